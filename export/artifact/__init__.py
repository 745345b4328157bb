"""The files of a bundle and their descriptions: manifest, passports of engines, shapes, targets."""
