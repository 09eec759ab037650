"""What layers share: settings, parameters, checks. See README.md in this folder."""
