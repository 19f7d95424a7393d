"""The tool `computer`: an app as pictures of a screen, used with mouse and keyboard."""
