//! The NBD protocol: parsing and encoding, no I/O.
