//! The files that the server has open: their identities, their users, and whether they are
//! released.

use std::collections::HashMap;
use std::fs::Metadata;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::sync::Arc;
use std::time::Instant;

use crate::blocks::BLOCK;

/// Two numbers of a device and an inode, or of a block device.
pub(crate) type Identity = (u64, u64, u64);

/// What makes two paths the same image: the inode, or for block devices the device.
pub(crate) fn identity(meta: &Metadata) -> Identity {
    if meta.file_type().is_block_device() {
        (0, 0, meta.rdev())
    } else {
        (meta.dev(), meta.ino(), u64::MAX)
    }
}

/// The open files, under the lock that opens and releases them.
#[derive(Debug, Default)]
pub(crate) struct OpenFiles {
    /// Indexes by identity.
    pub(crate) files: HashMap<Identity, usize>,
    /// The export that was opened last under each name.
    pub(crate) names: HashMap<String, usize>,
    /// States by index.
    pub(crate) states: Vec<FileState>,
}

impl OpenFiles {
    /// Returns the open file of that identity. A released file must have the same length still,
    /// otherwise it is opened anew; a file in use keeps the length that it was opened with.
    pub(crate) fn find(&self, identity: &Identity, len: u64) -> Option<usize> {
        let file = *self.files.get(identity)?;
        let state = &self.states[file];
        (!state.released || state.len == len).then_some(file)
    }
}

/// When a file was last used, and whether it is released.
#[derive(Debug)]
pub(crate) struct FileState {
    /// Length when the file was opened, in bytes.
    pub(crate) len: u64,
    /// Each user has a reference.
    pub(crate) users: FileUse,
    /// How often clients have opened it.
    pub(crate) touched: u64,
    /// When it was first seen unused.
    pub(crate) since: Option<Instant>,
    /// A thread is releasing it, or has failed to.
    pub(crate) tried: bool,
    /// It is not locked, and none of its blocks is cached.
    pub(crate) released: bool,
}

impl FileState {
    /// The state of a file that was just opened.
    pub(crate) fn new(len: u64) -> Self {
        Self { len, users: Arc::default(), touched: 0, since: None, tried: false, released: false }
    }

    /// Notes that the open file has grown. If that is not by whole blocks, the next release opens
    /// the file anew.
    pub(crate) fn resize(&mut self, len: u64) {
        if len.is_multiple_of(BLOCK as u64) {
            self.len = len;
        }
    }

    pub(crate) fn is_used(&mut self) -> bool {
        Arc::get_mut(&mut self.users).is_none() // if there is no user, all that users did has happened before
    }

    pub(crate) fn touch(&mut self) {
        self.touched += 1;
        (self.since, self.tried) = (None, false);
    }
}

/// A use of a file: by a connection, and by those of its operations that outlive it. Its drop ends
/// the use.
pub(crate) type FileUse = Arc<()>;
