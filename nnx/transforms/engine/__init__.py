"""The engine that lifts every transform."""
