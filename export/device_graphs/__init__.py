"""Small graphs without weights that keep a decode's state on the device."""
