//! Idle images of a folder are released: synced, dropped from the cache, and unlocked for other
//! programs.
//!
//! ```text
//!  connection ──┐
//!  operations ──┴ FileUse  unused for a while ─► a thread: sync ─► still unused? ─yes─► drop its blocks, unlock
//!                                                     └─no──► it stays as it is ◄── opened again ──┘
//! ```
//!
//! If a client opens the image again, it is locked again and read from the device: other programs
//! may have written to it. The image keeps its index and its descriptor, because requests name a
//! file by its index for as long as the server lives. An image that has another length by then is
//! opened anew, at another index.
//!
//! Opening an image, beginning to use it, and releasing it take one lock. Only the sync, which may
//! take long, runs without. The release notes whether a client opened the image meanwhile, and then
//! leaves it as it is.

use std::future::Future;
use std::io;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Waker};
use std::time::{Duration, Instant};

use nbd_protocol::Negotiated;
use percpu::rcu;
use tracing::{info, warn};

use crate::export::ExportTable;
use crate::lock::unlock;
use crate::open_files::FileUse;

/// How often the server looks for idle images.
pub(crate) const IDLE_CHECK: Duration = Duration::from_secs(1);

impl ExportTable {
    /// Returns the export that a client negotiated, and the client's use of it. `None` if the
    /// export is another one by now.
    pub(crate) fn begin(&self, negotiated: &Negotiated) -> Option<(usize, FileUse)> {
        let mut known = self.known.lock();
        let index = self.index_of(&known, negotiated)?;
        let file = self.get(index).file;
        let state = &mut known.states[file];
        state.touch();
        // It was opened a moment ago, unless the client took longer than idle images are kept.
        (!state.released).then(|| (index, Arc::clone(&state.users)))
    }

    /// Has threads of the cache release the files that were unused for long enough. Does not wait
    /// for them.
    pub(crate) fn release_idle(self: &Arc<Self>, now: Instant) {
        if self.args.idle == 0 {
            return;
        }
        // Closed connections and their uses are dropped after a grace period, which this call
        // advances.
        rcu::poll();
        let Some(mut known) = self.known.try_lock() else { return }; // a client opens a file
        let mut idle = Vec::new();
        for (file, state) in known.states.iter_mut().enumerate().skip(self.fixed_files) {
            if state.released || state.tried {
                continue;
            }
            if state.is_used() {
                state.since = None;
                continue;
            }
            let since = *state.since.get_or_insert(now);
            if now.saturating_duration_since(since) < Duration::from_secs(self.args.idle) {
                continue;
            }
            state.tried = true;
            idle.push(file);
        }
        drop(known); // the releases take it, on this thread if the cache can start no other
        for file in idle {
            let exports = Arc::clone(self);
            let call = self.image(file).device.call_async(move |_| {
                let _ = exports.release(file, || {}); // `release` has logged it
            });
            // The first poll begins the call, which ends without the future.
            let _ = pin!(call).poll(&mut Context::from_waker(Waker::noop()));
        }
    }

    /// Releases an unused file, unless a client opens it meanwhile. Blocks.
    fn release(&self, file: usize, meanwhile: impl FnOnce()) -> io::Result<()> {
        let touched = self.known.lock().states[file].touched;
        let synced = self.sync_file(file);
        meanwhile();
        let name = self.names_of(file).next().unwrap_or_default();
        if let Err(error) = synced {
            // The next release is tried after a client has used the file, and that client is told
            // of the error.
            warn!(export = name, %error, "an image stays locked");
            return Err(error);
        }
        let mut known = self.known.lock();
        let state = &mut known.states[file];
        if state.touched != touched || state.is_used() {
            (state.since, state.tried) = (None, false);
            return Ok(());
        }
        if self.image(file).forget() {
            if let Some(file) = self.image(file).file().filter(|_| !self.args.no_lock) {
                unlock(file)?;
            }
            state.released = true;
            info!(export = name, "no client has it open: let go");
        }
        state.tried = false;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::{Seek, SeekFrom};
    use std::os::unix::fs::FileExt;

    use clap::Parser;
    use nbd_protocol::{Exports, HeaderStyle};
    use tempfile::TempDir;

    use super::*;
    use crate::args::Args;
    use crate::blocks::BLOCK;
    use crate::lock::lock;

    /// A folder with an image, and the exports of it.
    fn folder(cache: &str) -> (TempDir, Arc<ExportTable>) {
        let dir = tempfile::tempdir().unwrap();
        File::create(dir.path().join("a")).unwrap().set_len(4 * BLOCK as u64).unwrap();
        let path = dir.path().to_str().unwrap();
        let args = ["nbd_server", "--export-dir", path, "--cache", cache];
        let table = ExportTable::open(&Args::parse_from(args)).unwrap();
        (dir, Arc::new(table))
    }

    fn negotiate(table: &ExportTable) -> Option<(usize, FileUse)> {
        let info = table.open("a")?.into_owned();
        let (size, flags) = (info.size, info.advertised(HeaderStyle::Structured));
        let export = "a".into();
        let agreed = |style, allocation, block_sizes| Negotiated {
            export,
            style,
            allocation,
            block_sizes,
            size,
            flags,
            tls: false,
        };
        table.begin(&agreed(HeaderStyle::Structured, false, false))
    }

    /// Whether another program may write to it.
    fn is_free(dir: &TempDir) -> bool {
        let path = dir.path().join("a");
        let file = File::options().read(true).write(true).open(&path).unwrap();
        lock(&file, false, Duration::ZERO).is_ok()
    }

    #[test]
    fn a_used_image_is_kept_and_a_released_one_is_locked_again() {
        for cache in ["0", "1M"] {
            let (dir, table) = folder(cache);
            let (index, used) = negotiate(&table).unwrap();
            let file = table.get(index).file;
            for _ in 0..2 {
                table.release(file, || {}).unwrap();
                assert!(!is_free(&dir), "it is used");
            }
            drop(used);
            table.release(file, || assert!(!is_free(&dir), "it is not synced yet")).unwrap();
            assert!(is_free(&dir), "--cache {cache}");
            let again = negotiate(&table).unwrap();
            assert!(!is_free(&dir) && again.0 == index, "it is locked again");
            drop(again);
            // Another program is first.
            table.release(file, || {}).unwrap();
            let path = dir.path().join("a");
            let other = File::options().write(true).open(&path).unwrap();
            lock(&other, false, Duration::ZERO).unwrap();
            assert!(negotiate(&table).is_none());
            drop(other);
            assert!(negotiate(&table).is_some());
        }
    }

    #[test]
    fn a_client_that_comes_during_the_sync_keeps_the_image() {
        let (dir, table) = folder("1M");
        let (index, used) = negotiate(&table).unwrap();
        let file = table.get(index).file;
        drop(used);
        let mut taken = None;
        table.release(file, || taken = negotiate(&table)).unwrap();
        assert!(taken.is_some() && !is_free(&dir), "it came");
        drop(taken);
        table.release(file, || drop(negotiate(&table))).unwrap();
        assert!(!is_free(&dir), "it came and went");
        // It was told of the image, and uses it a moment later.
        table.release(file, || drop(table.open("a").unwrap())).unwrap();
        assert!(!is_free(&dir), "it is about to");
    }

    #[test]
    fn a_release_writes_back_and_later_reads_see_other_programs_writes() {
        let (dir, table) = folder("1M");
        let (index, used) = negotiate(&table).unwrap();
        let file = table.get(index).file;
        let image = table.image(file);
        assert_eq!(image.try_write(BLOCK as u64, &[7; BLOCK]), Ok(BLOCK));
        let mut bytes = [0; BLOCK];
        assert!(image.try_read(BLOCK as u64, &mut bytes) && bytes == [7; BLOCK]);
        drop(used);
        table.release(file, || {}).unwrap();
        let mut other = File::options().read(true).write(true).open(dir.path().join("a")).unwrap();
        other.read_exact_at(&mut bytes, BLOCK as u64).unwrap();
        assert_eq!(bytes, [7; BLOCK]);
        assert_eq!(other.seek(SeekFrom::End(0)).unwrap(), 4 * BLOCK as u64);
        other.write_all_at(&[8; BLOCK], BLOCK as u64).unwrap();
        let _used = negotiate(&table).unwrap();
        assert!(!image.try_read(BLOCK as u64, &mut bytes), "it is not what it was");
    }

    #[test]
    fn a_released_image_of_another_length_is_opened_anew() {
        for (cache, blocks) in [("0", 1), ("0", 8), ("1M", 1), ("1M", 8)] {
            let len = (blocks * BLOCK) as u64;
            let (dir, table) = folder(cache);
            let (index, used) = negotiate(&table).unwrap();
            drop(used);
            let other = File::options().write(true).open(dir.path().join("a")).unwrap();
            table.release(table.get(index).file, || {}).unwrap();
            other.set_len(len).unwrap();
            assert_eq!(table.find("a").unwrap().size, len, "--cache {cache}");
            let (index, _used) = negotiate(&table).unwrap();
            assert_eq!(table.get(index).info.size, len, "--cache {cache}");
            assert!(!is_free(&dir), "it is locked");
            // Not while it is used.
            other.set_len(2 * len).unwrap();
            assert_eq!(table.find("a").unwrap().size, len);
            assert_eq!(negotiate(&table).unwrap().0, index);
            table.sync().unwrap();
        }
    }

    #[test]
    fn only_long_idle_images_are_released() {
        let (dir, table) = folder("1M");
        let begun = Instant::now();
        let used = negotiate(&table).unwrap();
        for seconds in [0, 100, 200] {
            table.release_idle(begun + Duration::from_secs(seconds));
        }
        drop(used);
        table.release_idle(begun + Duration::from_secs(300));
        table.release_idle(begun + Duration::from_secs(305));
        assert!(!is_free(&dir) && !table.known.lock().states[0].tried, "it is not long");
        table.release_idle(begun + Duration::from_secs(320));
        assert!(table.known.lock().states[0].tried || table.known.lock().states[0].released);
        while !table.known.lock().states[0].released {
            std::thread::yield_now();
        }
        assert!(is_free(&dir));
    }
}
