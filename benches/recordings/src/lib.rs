//! Recordings of kernels under load: see `README.md` for the formats and where they come from.
//!
//! ```
//! let recording = recordings::files::DBENCH64;
//! let events = recording.load()?;
//! assert_eq!(events.len(), 129_976);
//! # Ok::<(), recordings::LoadError>(())
//! ```

pub mod files;
mod packed;
pub mod xfsbuf;

pub use self::packed::LoadError;
