"""The files of a bundle and what they promise: manifest, passports of engines, shapes, targets."""
