"""An app that is used by its screen alone: click the tile of the colour that the task names."""
