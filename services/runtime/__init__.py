"""What every service stands on: settings, logs, the bus, the supervisor."""
