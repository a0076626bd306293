// Loaded before the shim of the search, which on pages from the disk replaces Worker by one that takes no data URL.
window.miniVllmNativeWorker = window.Worker;
