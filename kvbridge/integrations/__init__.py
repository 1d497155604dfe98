"""KVBridge inside engines of others; each package needs its engine installed."""
