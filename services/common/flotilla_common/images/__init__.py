"""Pictures that policies see: their bytes, and the tokens that stand for them.

Start at `vision_family.py`, which describes how a family of models reads pictures. Only this room
imports Pillow and the families' image processors."""
