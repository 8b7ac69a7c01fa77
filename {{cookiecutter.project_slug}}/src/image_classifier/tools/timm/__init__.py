"""Networks of the library timm, by the names `timm/NAME`."""
