"""One pyramid backbone whose attention kind is chosen by name; importing the package itself needs no torch."""
