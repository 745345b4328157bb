"""The files of a bundle and their descriptions: manifest, graphs, passports of engines, shapes, targets."""
