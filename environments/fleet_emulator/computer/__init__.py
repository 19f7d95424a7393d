"""The tool `computer`: an app as pictures of a screen, to be used with mouse and keyboard."""
