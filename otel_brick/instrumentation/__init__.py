"""OpenTelemetry instrumentors: what a framework launches, seen without a change to the program."""
