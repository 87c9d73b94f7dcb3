"""Embedded data and models, packed image sets and the loaders that read them."""

from attngeo.data import embedded, parted_wheels

# Here and not among the other ways: `embedded` belongs to the code of every training, and parted wheels to none.
embedded._ROUTES["pip-parts"] = parted_wheels.from_parted_wheels
