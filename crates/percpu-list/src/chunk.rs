//! The entries that a walk or a drain takes under one lock, and returns without it.

use offlock_percpu::lglock::LockError;

/// The number of entries in a chunk. A guess: large enough to make the price of the lock small, and
/// small enough to hold the lock for less than a microsecond. The models use few entries.
pub(crate) const CHUNK: usize = if cfg!(offlock_model) { 1 } else { 32 };

/// A queue of at most [`CHUNK`] entries, which is filled again when it is empty.
#[derive(Debug)]
pub(crate) struct Chunk<P> {
    entries: [Option<P>; CHUNK],
    next: usize,
    len: usize,
    /// The error that ended the last fill. It is returned after the entries.
    error: Option<LockError>,
}

impl<P> Chunk<P> {
    pub(crate) fn new() -> Self {
        Self { entries: std::array::from_fn(|_| None), next: 0, len: 0, error: None }
    }

    /// Returns whether the chunk has no room for another entry.
    pub(crate) fn is_full(&self) -> bool {
        self.len == CHUNK
    }

    /// Returns whether the last fill has added no entry yet.
    pub(crate) fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Adds an entry.
    ///
    /// # Panics
    ///
    /// Panics if the chunk is full.
    pub(crate) fn push(&mut self, entry: P) {
        self.entries[self.len] = Some(entry);
        self.len += 1;
    }

    /// Returns the next entry, in the order of the pushes. Calls `fill` if there is none.
    ///
    /// If `fill` adds entries and returns an error, the entries come before the error. If it adds
    /// none, the walk is at its end.
    pub(crate) fn next(
        &mut self,
        fill: impl FnOnce(&mut Self) -> Result<(), LockError>,
    ) -> Option<Result<P, LockError>> {
        if self.next == self.len {
            if let Some(error) = self.error.take() {
                return Some(Err(error));
            }
            (self.next, self.len) = (0, 0);
            self.error = fill(self).err();
            if self.len == 0 {
                return self.error.take().map(Err);
            }
        }
        self.next += 1;
        self.entries[self.next - 1].take().map(Ok)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_comes_once_and_after_the_entries() {
        let mut chunk = Chunk::new();
        let first = chunk.next(|chunk| {
            chunk.push(1);
            Err(LockError::Deadlock)
        });
        assert_eq!(first, Some(Ok(1)));
        assert_eq!(chunk.next(|_| panic!("the error comes first")), Some(Err(LockError::Deadlock)));
        assert_eq!(chunk.next(|_| Ok(())), None);
    }
}
