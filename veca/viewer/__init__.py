"""`veca view`: a local page on which to move through an image of any size and ask what is like what (docs/view.md)."""
