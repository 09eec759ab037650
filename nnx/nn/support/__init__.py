"""What layers share: settings, parameters, checks."""
