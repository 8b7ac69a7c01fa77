"""The command `serve`: a web service that labels the images it is sent."""
