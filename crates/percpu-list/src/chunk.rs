//! What a walk or a drain took under one lock, and gives out without it.

use percpu::lglock::LockError;

/// Entries taken under one lock. A guess: enough to make the lock's price small, and few enough to
/// hold others up for less than a microsecond. A model has few entries.
pub(crate) const CHUNK: usize = if cfg!(any(offlock_loom, offlock_shuttle)) { 1 } else { 32 };

/// See the module.
#[derive(Debug)]
pub(crate) struct Chunk<P> {
    taken: [Option<P>; CHUNK],
    next: usize,
    len: usize,
    /// Why no more were taken: said after those that were.
    refused: Option<LockError>,
}

impl<P> Chunk<P> {
    pub(crate) fn new() -> Self {
        Self { taken: std::array::from_fn(|_| None), next: 0, len: 0, refused: None }
    }

    /// Whether there is room for more.
    pub(crate) fn is_full(&self) -> bool {
        self.len == CHUNK
    }

    /// Whether nothing was taken.
    pub(crate) fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Takes one more; there is room.
    pub(crate) fn push(&mut self, taken: P) {
        self.taken[self.len] = Some(taken);
        self.len += 1;
    }

    /// What was taken first of what is left; `fill` takes more when nothing is. What it takes
    /// together with an error comes before that. At the end it takes nothing.
    pub(crate) fn next(
        &mut self,
        fill: impl FnOnce(&mut Self) -> Result<(), LockError>,
    ) -> Option<Result<P, LockError>> {
        if self.next == self.len {
            if let Some(error) = self.refused.take() {
                return Some(Err(error));
            }
            (self.next, self.len) = (0, 0);
            self.refused = fill(self).err();
            if self.len == 0 {
                return self.refused.take().map(Err);
            }
        }
        self.next += 1;
        self.taken[self.next - 1].take().map(Ok)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_comes_after_what_was_taken_and_once() {
        let mut chunk = Chunk::new();
        let first = chunk.next(|chunk| {
            chunk.push(1);
            Err(LockError::Deadlock)
        });
        assert_eq!(first, Some(Ok(1)));
        assert_eq!(chunk.next(|_| panic!("refused")), Some(Err(LockError::Deadlock)));
        assert_eq!(chunk.next(|_| Ok(())), None);
    }
}
