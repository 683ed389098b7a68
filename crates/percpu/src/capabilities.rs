//! What this process can use, and why not more.
