"""An issue tracker: close issues, assign them."""
