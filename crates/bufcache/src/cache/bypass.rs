//! Bypasses: the caller writes blocks to the device by its own means, while the cache excludes
//! them. A bypass begins and ends without a wait.
//!
//! The blocks are treated as in a [discard](super::overwrite): their range is excluded, clean
//! buffers are invalidated, and dirty ones are marked, and dropped once the device has the new
//! bytes.

use std::fmt;
use std::io;
use std::marker::PhantomData;
use std::ops::Range;

use offlock_sync::Arc;

use super::Shared;
use super::overwrite::Marked;
use crate::dirty::{WriteError, errno_of};
use crate::error::GetError;
use crate::hazard;
use crate::source::{Operation, Source};
use crate::wait::Mode;
use crate::word::Key;

/// A bypass prefetches the home of the block that is this many behind the one it looks up, because
/// neighbours have homes at random places of the table. A guess: more than the misses that a CPU has
/// in flight.
const AHEAD: usize = 16;

/// The exclusive right to write a range of blocks to the device directly, from
/// [`Device::try_bypass`](crate::Device::try_bypass).
///
/// Keep it until the write has ended, even if the write is abandoned: a write that reaches the
/// device after that overwrites newer bytes, even of a file that is closed and attached again.
///
/// A get of one of the blocks waits until [`finish`](Self::finish) or the drop, which counts as a
/// failed write. A thread that holds a bypass deadlocks if it gets one of the blocks or closes the
/// device.
#[must_use = "a drop counts as a failed write: end it with `finish`"]
pub struct Bypass {
    /// `None` once it has ended.
    source: Option<Operation<Arc<Source>>>,
    sectors: Range<u64>,
    marked: Marked,
    /// Set once the holder may have begun to write.
    is_begun: bool,
    /// Not `Send`, because its end needs the slots that this thread has reserved.
    _thread: PhantomData<*const ()>,
}

impl Bypass {
    /// Ends the bypass with the result of the write. After a success the cache drops its buffers of
    /// the blocks. After an error each sector has its old or its new bytes, and dirty buffers stay
    /// dirty.
    ///
    /// # Errors
    ///
    /// [`WriteError::Io`] with the errno of `result` and the first block.
    pub fn finish(mut self, result: io::Result<()>) -> Result<(), WriteError> {
        self.end(result)
    }

    fn end(&mut self, result: io::Result<()>) -> Result<(), WriteError> {
        let Some(source) = self.source.take() else { return Ok(()) };
        let _leaves = Leaves { source: &source, sectors: &self.sectors };
        let shared = &source.cache;
        // Inserted again at the end, because a sync that began meanwhile does not make the write
        // durable.
        if self.is_begun {
            source.writes.change_unsynced(|unsynced| unsynced.written.insert(self.sectors.clone()));
        }
        if let Err(error) = result {
            shared.unmark_all(&source, &self.marked);
            let block = source.block(Key::new(source.id, self.sectors.start));
            return Err(WriteError::Io { errno: errno_of(&error), block });
        }
        source.writes.load.set_succeeding();
        shared.counters.write_calls.add(1);
        let marked = self.marked.iter();
        marked.for_each(|&(key, frame)| shared.drop_marked(&source, key, frame));
        Ok(())
    }
}

/// Ends the exclusion of the range, also if the end of the write panics.
struct Leaves<'b> {
    source: &'b Source,
    sectors: &'b Range<u64>,
}

impl Drop for Leaves<'_> {
    fn drop(&mut self) {
        self.source.writes.excluded.leave(self.sectors);
    }
}

impl Drop for Bypass {
    fn drop(&mut self) {
        let _ = self.end(Err(io::Error::from_raw_os_error(libc::ECANCELED)));
    }
}

impl fmt::Debug for Bypass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Bypass").field("sectors", &self.sectors).finish_non_exhaustive()
    }
}

impl Shared {
    /// Excludes a range of blocks, and drops or marks their buffers. Returns `None` if that has to
    /// wait, or if the range is long.
    pub(crate) fn try_bypass(
        &self,
        source: &Arc<Source>,
        blocks: Range<u64>,
    ) -> Result<Option<Bypass>, WriteError> {
        self.check_sync(source)?;
        if source.is_read_only {
            return Err(WriteError::ReadOnly);
        }
        let is_long = blocks.end.saturating_sub(blocks.start) > self.frames.count() as u64;
        let sectors = source.sectors_of(blocks.clone());
        if is_long || self.has_many_extents(source) {
            return Ok(None);
        }
        // Reserved first: once blocks are marked, no step that unmarks them may fail.
        hazard::reserve().map_err(GetError::from)?;
        let operation = Operation::begin(Arc::clone(source)).ok_or(WriteError::Closed)?;
        if !source.writes.excluded.try_enter(&sectors) {
            return Ok(None);
        }
        let (marked, is_begun) = (Marked::new(), false);
        let source_of = Some(operation);
        let mut bypass =
            Bypass { source: source_of, sectors, marked, is_begun, _thread: PhantomData };
        if source.writes.refuses_writers() {
            return Err(WriteError::Closed); // the drop of `bypass` changes nothing
        }
        let ahead = blocks.clone().skip(AHEAD).map(Some).chain(std::iter::repeat(None));
        for (block, ahead) in blocks.zip(ahead) {
            if let Some(key) = ahead.and_then(|ahead| source.key(ahead)) {
                self.table.prefetch(key);
            }
            let Some(key) = source.key(block) else { continue };
            if self.invalidate_or_mark(source, key, Mode::Thread, &mut bypass.marked).is_err() {
                return Ok(None); // the drop of `bypass` unmarks the blocks
            }
        }
        // Before the write: whether it succeeds or not, the old bytes may be gone.
        source.writes.change_unsynced(|unsynced| unsynced.written.insert(bypass.sectors.clone()));
        bypass.is_begun = true;
        Ok(Some(bypass))
    }
}
