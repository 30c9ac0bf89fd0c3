"""The machinery that decides, installs, records and undoes.  It knows no library by name."""
