//! Images of a folder that no client has open are released, so that other programs may lock them.
//!
//! ```text
//!  connection ──┐
//!  operations ──┴ Use      unused for a while ─► a thread: sync ─► still unused? ─yes─► forget its blocks, unlock
//!                                                     └─no──► it stays as it is ◄── asked for ──┘
//! ```
//!
//! If a client asks for the image again, it is locked again, and read from the device: other programs may have written
//! to it. It keeps its place and its descriptor, because requests name a file by its place for as long as the server
//! lives; an image that has another length now is opened anew, at another place.
//!
//! To open an image, to begin to use it, and to release it take one lock. Only the sync, which may take long, is done
//! without. A client that asks for the image meanwhile is counted, and the image is not released then.

use std::collections::HashMap;
use std::future::Future;
use std::io;
use std::path::Path;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Waker};
use std::time::{Duration, Instant};

use nbd_protocol::Negotiated;
use percpu::rcu;
use tracing::{info, warn};

use crate::export::{ExportError, ExportTable, Identity};
use crate::lock::{lock, unlock};

/// How often the server looks for images that no client has open.
pub(crate) const LOOK: Duration = Duration::from_secs(1);

/// The open files.
#[derive(Debug, Default)]
pub(crate) struct Known {
    /// By what they are.
    pub(crate) files: HashMap<Identity, usize>,
    /// The export that was opened last under each name.
    pub(crate) names: HashMap<String, usize>,
    /// By index.
    pub(crate) rest: Vec<Rest>,
}

impl Known {
    /// The open file of that identity and length; but the length of one that is in use is what it was when
    /// it was opened. A file that got another length while it was unused is opened anew.
    pub(crate) fn find(&self, identity: &Identity, len: u64) -> Option<usize> {
        let file = *self.files.get(identity)?;
        let rest = &self.rest[file];
        (!rest.asleep || rest.len == len).then_some(file)
    }
}

/// Whether a file rests.
#[derive(Debug)]
pub(crate) struct Rest {
    /// Bytes that it had when it was opened.
    len: u64,
    /// Times that it was asked for.
    asked: u64,
    /// No client has had it open since.
    since: Option<Instant>,
    /// A thread is about to release it, or could not.
    tried: bool,
    /// It is not locked, and nothing of it is cached.
    asleep: bool,
}

impl Rest {
    /// Of a file that is open now.
    pub(crate) fn new(len: u64) -> Self {
        Self { len, asked: 0, since: None, tried: false, asleep: false }
    }

    fn ask(&mut self) {
        self.asked += 1;
        (self.since, self.tried) = (None, false);
    }
}

/// How many use each file.
#[derive(Debug)]
pub(crate) struct Uses(Box<[AtomicUsize]>);

impl Uses {
    pub(crate) fn new(files: usize) -> Arc<Self> {
        Arc::new(Self((0..files).map(|_| AtomicUsize::new(0)).collect()))
    }

    fn begin(self: &Arc<Self>, file: usize) -> Use {
        // Ordering: Relaxed; the lock that a release takes is held.
        self.0[file].fetch_add(1, Ordering::Relaxed);
        Use { uses: Arc::clone(self), file }
    }

    fn is_used(&self, file: usize) -> bool {
        // Ordering: Acquire pairs with the Release of `Use::drop`; it carries what was done with the file.
        self.0[file].load(Ordering::Acquire) > 0
    }
}

/// A use of a file: by a connection, and by those of its operations that outlive it.
#[derive(Debug)]
pub(crate) struct Use {
    uses: Arc<Uses>,
    file: usize,
}

impl Drop for Use {
    fn drop(&mut self) {
        // Ordering: Release; see `Uses::is_used`.
        self.uses.0[self.file].fetch_sub(1, Ordering::Release);
    }
}

impl ExportTable {
    /// The export that a client negotiated, if it is what the client was told; and that it uses it now.
    pub(crate) fn begin(&self, negotiated: &Negotiated) -> Option<(usize, Use)> {
        let mut known = self.known.lock();
        let index = self.index_of(&known, negotiated)?;
        let file = self.get(index).file;
        let rest = &mut known.rest[file];
        rest.ask();
        // It was opened a moment ago, or a client took longer than images are kept.
        (!rest.asleep).then(|| (index, self.uses.begin(file)))
    }

    /// Has an open file be locked, whatever it was.
    pub(crate) fn wake(
        &self,
        rest: &mut Rest,
        file: usize,
        path: &Path,
        patience: Duration,
    ) -> Result<(), ExportError> {
        rest.ask();
        if rest.asleep && !self.args.no_lock {
            lock(&self.files[file], self.args.read_only, path, patience)?;
        }
        rest.asleep = false;
        Ok(())
    }

    /// Has threads of the cache release the files that no client has had open for long enough. Does not wait for them.
    pub(crate) fn look_for_idle(self: &Arc<Self>, now: Instant) {
        if self.args.idle == 0 {
            return;
        }
        // Closed connections are dropped, and what they used with them, behind a grace period: go on with it.
        rcu::poll();
        let Some(mut known) = self.known.try_lock() else { return }; // a client opens one
        let mut idle = Vec::new();
        for (file, rest) in known.rest.iter_mut().enumerate().skip(self.fixed_files) {
            if rest.asleep || rest.tried {
                continue;
            }
            if self.uses.is_used(file) {
                rest.since = None;
                continue;
            }
            let since = *rest.since.get_or_insert(now);
            if now.saturating_duration_since(since) < Duration::from_secs(self.args.idle) {
                continue;
            }
            rest.tried = true;
            idle.push(file);
        }
        drop(known); // the calls take it, on this thread if the cache can start no other
        for file in idle {
            let exports = Arc::clone(self);
            let call = self.image(file).device.call_async(move |_| {
                let _ = exports.let_go(file, || {}); // which has said so
            });
            // The first poll begins the call, which ends without the future.
            let _ = pin!(call).poll(&mut Context::from_waker(Waker::noop()));
        }
    }

    /// Releases a file that is not used, unless a client asks for it meanwhile. Blocks.
    fn let_go(&self, file: usize, meanwhile: impl FnOnce()) -> io::Result<()> {
        let asked = self.known.lock().rest[file].asked;
        let synced = self.sync_file(file);
        meanwhile();
        let name = self.names_of(file).next().unwrap_or_default();
        if let Err(error) = synced {
            // It is tried again once a client has used it, which is told of the error before.
            warn!(export = name, %error, "an image stays locked");
            return Err(error);
        }
        let mut known = self.known.lock();
        let rest = &mut known.rest[file];
        if rest.asked != asked || self.uses.is_used(file) {
            (rest.since, rest.tried) = (None, false);
            return Ok(());
        }
        if self.image(file).forget() {
            if !self.args.no_lock {
                unlock(&self.files[file])?;
            }
            rest.asleep = true;
            info!(export = name, "no client has it open: let go");
        }
        rest.tried = false;
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

    /// A folder with an image, and the exports of it.
    fn folder(cache: &str) -> (TempDir, Arc<ExportTable>) {
        let dir = tempfile::tempdir().unwrap();
        File::create(dir.path().join("a")).unwrap().set_len(4 * BLOCK as u64).unwrap();
        let path = dir.path().to_str().unwrap();
        let args = ["nbd_server", "--export-dir", path, "--cache", cache];
        let table = ExportTable::open(&Args::parse_from(args)).unwrap();
        (dir, Arc::new(table))
    }

    fn negotiate(table: &ExportTable) -> Option<(usize, Use)> {
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
        lock(&file, false, &path, Duration::ZERO).is_ok()
    }

    #[test]
    fn who_uses_an_image_keeps_it_and_who_comes_back_gets_it() {
        for cache in ["0", "1M"] {
            let (dir, table) = folder(cache);
            let (index, used) = negotiate(&table).unwrap();
            let file = table.get(index).file;
            for _ in 0..2 {
                table.let_go(file, || {}).unwrap();
                assert!(!is_free(&dir), "it is used");
            }
            drop(used);
            table.let_go(file, || assert!(!is_free(&dir), "it is not synced yet")).unwrap();
            assert!(is_free(&dir), "--cache {cache}");
            let again = negotiate(&table).unwrap();
            assert!(!is_free(&dir) && again.0 == index, "it is locked again");
            drop(again);
            // Another program is first.
            table.let_go(file, || {}).unwrap();
            let path = dir.path().join("a");
            let other = File::options().write(true).open(&path).unwrap();
            lock(&other, false, &path, Duration::ZERO).unwrap();
            assert!(negotiate(&table).is_none());
            drop(other);
            assert!(negotiate(&table).is_some());
        }
    }

    #[test]
    fn who_comes_while_it_is_synced_keeps_it() {
        let (dir, table) = folder("1M");
        let (index, used) = negotiate(&table).unwrap();
        let file = table.get(index).file;
        drop(used);
        let mut taken = None;
        table.let_go(file, || taken = negotiate(&table)).unwrap();
        assert!(taken.is_some() && !is_free(&dir), "it came");
        drop(taken);
        table.let_go(file, || drop(negotiate(&table))).unwrap();
        assert!(!is_free(&dir), "it came and went");
        // It was told of the image, and uses it a moment later.
        table.let_go(file, || drop(table.open("a").unwrap())).unwrap();
        assert!(!is_free(&dir), "it is about to");
    }

    #[test]
    fn what_was_written_is_there_and_what_others_write_is_seen() {
        let (dir, table) = folder("1M");
        let (index, used) = negotiate(&table).unwrap();
        let file = table.get(index).file;
        let image = table.image(file);
        assert_eq!(image.try_write(BLOCK as u64, &[7; BLOCK]), Ok(BLOCK));
        let mut bytes = [0; BLOCK];
        assert!(image.try_read(BLOCK as u64, &mut bytes) && bytes == [7; BLOCK]);
        drop(used);
        table.let_go(file, || {}).unwrap();
        let mut other = File::options().read(true).write(true).open(dir.path().join("a")).unwrap();
        other.read_exact_at(&mut bytes, BLOCK as u64).unwrap();
        assert_eq!(bytes, [7; BLOCK]);
        assert_eq!(other.seek(SeekFrom::End(0)).unwrap(), 4 * BLOCK as u64);
        other.write_all_at(&[8; BLOCK], BLOCK as u64).unwrap();
        let _used = negotiate(&table).unwrap();
        assert!(!image.try_read(BLOCK as u64, &mut bytes), "it is not what it was");
    }

    #[test]
    fn what_others_made_longer_or_shorter_is_so() {
        for (cache, blocks) in [("0", 1), ("0", 8), ("1M", 1), ("1M", 8)] {
            let len = (blocks * BLOCK) as u64;
            let (dir, table) = folder(cache);
            let (index, used) = negotiate(&table).unwrap();
            drop(used);
            let other = File::options().write(true).open(dir.path().join("a")).unwrap();
            table.let_go(table.get(index).file, || {}).unwrap();
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
    fn only_what_nobody_has_open_for_long_is_let_go_of() {
        let (dir, table) = folder("1M");
        let begun = Instant::now();
        let used = negotiate(&table).unwrap();
        for seconds in [0, 100, 200] {
            table.look_for_idle(begun + Duration::from_secs(seconds));
        }
        drop(used);
        table.look_for_idle(begun + Duration::from_secs(300));
        table.look_for_idle(begun + Duration::from_secs(305));
        assert!(!is_free(&dir) && !table.known.lock().rest[0].tried, "it is not long");
        table.look_for_idle(begun + Duration::from_secs(320));
        assert!(table.known.lock().rest[0].tried || table.known.lock().rest[0].asleep);
        while !table.known.lock().rest[0].asleep {
            std::thread::yield_now();
        }
        assert!(is_free(&dir));
    }
}
