"""Device time: streams and events, kernel launches, and the identity of kernels."""
