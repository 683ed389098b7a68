//! Recordings of kernels under load: see `README.md` for the formats and where they come from.
//!
//! ```
//! let recording = recordings::files::DBENCH64;
//! let events = recording.load()?;
//! assert_eq!(events.len(), 129_976);
//! # Ok::<(), std::io::Error>(())
//! ```

pub mod files;
mod packed;
pub mod xfsbuf;
