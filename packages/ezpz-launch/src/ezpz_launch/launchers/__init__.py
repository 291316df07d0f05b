"""One module a launcher: a plan goes in, that launcher's argument list comes out."""
