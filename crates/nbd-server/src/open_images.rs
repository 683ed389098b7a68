//! The open images of files: one for each file, however many names it has.
//!
//! ```text
//!  export of the command line ──────────────────────────┐
//!  connection ─► session ─► WorkerImage ────────────────┼─► Image: the file, its lock, its blocks
//!  operation, other call ───────────────────────────────┤
//!  OpenImages ─ identity of the file ─► Slot ───────────┘
//! ```
//!
//! Each arrow to an image is a reference. An image is idle if its slot has the only one. An image
//! of a folder that stays idle is released: it is synced, unlocked for other programs, and dropped.
//! The next client that opens the file gets a new image, which reads the file anew, because another
//! program may have written to it.
//!
//! A thread holds the slot's `opening` lock while it opens or drops the image, so a slow file
//! delays its own clients only. The `state` lock is never held during a system call, because the
//! descriptions of exports and the server's last sync take it: neither waits for a file that hangs
//! while it is opened or unlocked. The sync before a release holds neither lock: the release checks
//! afterwards whether a client has opened the image, and then keeps it.

use std::collections::HashMap;
use std::fs::File;
use std::io;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use offlock_sync::Mutex;
use tracing::{info, warn};

use crate::blocks::{BLOCK, Image};
use crate::files::{Identity, length, unlock};

/// Most releases that one search starts. Each runs on a thread of its own, so that an image that
/// hangs does not delay the others.
const AT_ONCE: usize = 64;

/// The open images by the identities of their files.
#[derive(Debug)]
pub(crate) struct OpenImages {
    slots: Mutex<HashMap<Identity, Arc<Slot>>>,
    /// Most images that may be open.
    most: usize,
    /// Images are locked when they are opened, so a release unlocks them.
    has_locks: bool,
}

/// One file's image, and the locks to open and release it.
#[derive(Debug, Default)]
struct Slot {
    /// Held while the image is opened or dropped. Locked before `state`.
    opening: Mutex<()>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    image: Option<Arc<Image>>,
    /// How often clients have opened the image.
    opened: u64,
    /// When the image was first found idle.
    idle_since: Option<Instant>,
    /// A release has begun, and perhaps failed, since a client last opened the image.
    release_begun: bool,
}

impl OpenImages {
    /// Makes a table without a limit.
    pub(crate) fn new(has_locks: bool) -> Self {
        Self { slots: Mutex::default(), most: usize::MAX, has_locks }
    }

    /// Limits the number of open images to the present number plus `more`.
    pub(crate) fn limit(&mut self, more: usize) {
        self.most = self.slots.get_mut().len() + more;
    }

    /// Returns the image of a file, made with `open` if there is none. `None` if too many are open.
    pub(crate) fn get<E>(
        &self,
        identity: Identity,
        open: impl FnOnce() -> Result<Arc<Image>, E>,
    ) -> Result<Option<Arc<Image>>, E> {
        let slot = {
            let mut slots = self.slots.lock();
            if slots.len() >= self.most && !slots.contains_key(&identity) {
                prune(&mut slots);
                if slots.len() >= self.most {
                    return Ok(None);
                }
            }
            Arc::clone(slots.entry(identity).or_default())
        };
        let opening = slot.opening.lock();
        let known = slot.state.lock().image.clone();
        let image = known.map_or_else(open, Ok);
        {
            let mut state = slot.state.lock();
            state.image = image.as_ref().ok().cloned();
            state.opened += 1;
            (state.idle_since, state.release_begun) = (None, false);
        }
        drop(opening);
        drop(slot);
        if image.is_err() {
            prune(&mut self.slots.lock());
        }
        image.map(Some)
    }

    /// Returns the image of a file if it is open.
    pub(crate) fn find(&self, identity: &Identity) -> Option<Arc<Image>> {
        let slot = self.slots.lock().get(identity).cloned()?;
        let state = slot.state.lock();
        state.image.clone()
    }

    /// Returns all images that were opened and are not released yet.
    pub(crate) fn all(&self) -> Vec<Arc<Image>> {
        let slots: Vec<_> = self.slots.lock().values().cloned().collect();
        slots.iter().filter_map(|slot| slot.state.lock().image.clone()).collect()
    }

    /// Grows images with their files, by whole blocks. Clients that connect later see the new sizes.
    pub(crate) fn grow(&self) {
        self.each(grow);
    }

    /// Calls `look` for each image. Waits for a thread that is opening the image, because that thread may
    /// have read the old length. The images that no thread opens come first.
    fn each(&self, look: impl Fn(&Image)) {
        let slots: Vec<_> = self.slots.lock().values().cloned().collect();
        let is_free = |slot: &Arc<Slot>| slot.opening.try_lock().is_some();
        let (free, others): (Vec<_>, Vec<_>) = slots.into_iter().partition(is_free);
        // Holds no lock and one image at a time, so that a file that hangs delays no client that opens its
        // image, and no release of another. The files after it are checked once it answers.
        for slot in free.into_iter().chain(others) {
            drop(slot.opening.lock());
            let image = slot.state.lock().image.clone();
            image.iter().for_each(|image| look(image));
        }
    }

    /// Blocks all access to the table until the result is dropped, like a file that hangs.
    #[cfg(test)]
    pub(crate) fn hold(&self) -> impl Sized {
        self.slots.lock()
    }

    /// Starts threads that release images that were idle for `patience`. Does not wait for them.
    pub(crate) fn release_idle(&self, now: Instant, patience: Duration) {
        let slots: Vec<_> = self.slots.lock().values().cloned().collect();
        let due = slots.into_iter().filter_map(|slot| slot.due(now, patience).map(|at| (slot, at)));
        for (slot, opened) in due.take(AT_ONCE) {
            let (its, has_lock) = (Arc::clone(&slot), self.has_locks);
            let release = move || drop(its.release(opened, has_lock, || {})); // an error is logged
            if thread::Builder::new().name("release".into()).spawn(release).is_err() {
                slot.state.lock().release_begun = false; // no memory for a thread: try again later
            }
        }
        prune(&mut self.slots.lock());
    }
}

/// Grows an image with its file, by whole blocks.
fn grow(image: &Image) {
    let Some(file) = image.file() else { return };
    let (name, before) = (&image.name, image.len());
    match length(file) {
        Ok(len) if len < before + BLOCK as u64 => {}
        Ok(len) if image.grow(len) => {
            info!(export = name, from = before, to = image.len(), "the image has grown");
            if len >= image.len() + BLOCK as u64 {
                warn!(export = name, len, "an export has at most 2^57 bytes");
            }
        }
        Ok(_) => {
            warn!(export = name, before, "only a size in whole blocks of {BLOCK} can grow")
        }
        Err(error) => {
            warn!(export = name, %error, "cannot tell whether the image has grown")
        }
    }
}

/// Removes slots that have no image and that no thread uses.
fn prune(slots: &mut HashMap<Identity, Arc<Slot>>) {
    slots.retain(|_, slot| {
        Arc::get_mut(slot).is_none_or(|slot| slot.state.get_mut().image.is_some())
    });
}

impl Slot {
    /// If the image has been idle for `patience`, marks it as being released, and returns how often
    /// it was opened. The caller must release it.
    fn due(&self, now: Instant, patience: Duration) -> Option<u64> {
        let mut state = self.state.lock();
        let state = &mut *state;
        // There is no other reference, so all earlier uses happened before.
        if Arc::get_mut(state.image.as_mut()?).is_none() {
            state.idle_since = None;
            return None;
        }
        let since = *state.idle_since.get_or_insert(now);
        let is_due = !state.release_begun && now.saturating_duration_since(since) >= patience;
        state.release_begun |= is_due;
        is_due.then_some(state.opened)
    }

    /// Releases the image, unless a client has opened it since [`due`](Self::due) returned
    /// `opened`. Everything that clients have written is synced here, so that the drop writes
    /// nothing. Blocks.
    fn release(&self, opened: u64, has_lock: bool, meanwhile: impl FnOnce()) -> io::Result<()> {
        let image = {
            let state = self.state.lock();
            state.image.clone().filter(|_| state.opened == opened)
        };
        let Some(image) = image else { return Ok(()) }; // `get` has reset `release_begun`
        let to_unlock = image
            .sync_now()
            .and_then(|()| image.file().filter(|_| has_lock).map(File::try_clone).transpose());
        meanwhile();
        let to_unlock = to_unlock.inspect_err(|error| {
            // The release is tried again after a client has used the image, and that client gets
            // the error.
            warn!(export = image.name, %error, "an image stays locked");
        })?;
        drop(image);
        // Held until the image is dropped, because the cache may have a file only once.
        let _opening = self.opening.lock();
        let image = {
            let mut state = self.state.lock();
            (state.idle_since, state.release_begun) = (None, false);
            let is_idle = state.image.as_mut().is_some_and(|image| Arc::get_mut(image).is_some());
            if state.opened != opened || !is_idle {
                return Ok(());
            }
            state.image.take()
        };
        let Some(image) = image else { return Ok(()) };
        let name = image.name.clone();
        drop(image);
        // Unlock before the last descriptor is closed: an engine may close its descriptor later.
        if let Some(Err(error)) = to_unlock.as_ref().map(unlock) {
            warn!(export = name, %error, "an image is not unlocked");
        }
        info!(export = name, "no client has it open: let go");
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;
    use std::sync::mpsc::{self, Receiver, Sender};

    use bufcache::BlockDevice;
    use clap::Parser;
    use tempfile::TempDir;
    use testkit::wait_until;

    use super::*;
    use crate::args::Args;
    use crate::blocks::{Backing, Source};
    use crate::export::{Export, ExportTable};
    use crate::files::lock;

    /// Makes a folder with an image, and its exports.
    fn folder(cache: &str) -> (TempDir, ExportTable) {
        let dir = tempfile::tempdir().unwrap();
        File::create(dir.path().join("a")).unwrap().set_len(4 * BLOCK as u64).unwrap();
        let path = dir.path().to_str().unwrap();
        let args = ["offlock-nbd", "--export-dir", path, "--cache", cache];
        let table = ExportTable::open(&Args::parse_from(args)).unwrap();
        (dir, table)
    }

    fn open(table: &ExportTable) -> Option<Export> {
        table.open_export("a").ok().flatten()
    }

    impl ExportTable {
        /// The slot of the only image.
        fn slot(&self) -> Arc<Slot> {
            self.images.slots.lock().values().next().cloned().unwrap()
        }

        /// Releases the only image if it is idle.
        fn release(&self, meanwhile: impl FnOnce()) {
            let slot = self.slot();
            let due = slot.due(Instant::now(), Duration::ZERO);
            if let Some(opened) = due {
                slot.release(opened, true, meanwhile).unwrap();
            }
        }
    }

    fn other(dir: &TempDir) -> File {
        File::options().read(true).write(true).open(dir.path().join("a")).unwrap()
    }

    /// Returns whether another program may write to the image.
    fn is_free(dir: &TempDir) -> bool {
        lock(&other(dir), false, Duration::ZERO).is_ok()
    }

    #[test]
    fn a_used_image_is_kept_and_a_released_one_is_locked_again() {
        for cache in ["0", "1M"] {
            let (dir, table) = folder(cache);
            let used = open(&table).unwrap();
            for _ in 0..2 {
                table.release(|| {});
                assert!(!is_free(&dir), "it is used");
            }
            drop(used);
            table.release(|| assert!(!is_free(&dir), "it is not synced yet"));
            assert!(is_free(&dir), "--cache {cache}");
            let again = open(&table).unwrap();
            assert!(!is_free(&dir), "it is locked again");
            drop(again);
            // Another program gets the lock first.
            table.release(|| {});
            let other = other(&dir);
            lock(&other, false, Duration::ZERO).unwrap();
            assert!(open(&table).is_none());
            assert!(table.images.slots.lock().is_empty(), "the slot of what was not opened");
            drop(other);
            assert!(open(&table).is_some());
        }
    }

    #[test]
    fn a_client_that_comes_during_the_sync_keeps_the_image() {
        let (dir, table) = folder("1M");
        drop(open(&table).unwrap());
        let mut taken = None;
        table.release(|| taken = open(&table));
        assert!(taken.is_some() && !is_free(&dir), "it came");
        drop(taken);
        table.release(|| drop(open(&table).unwrap()));
        assert!(!is_free(&dir), "it came and went");
        let mut seen = Vec::new();
        table.release(|| seen = table.images.all());
        assert!(seen.len() == 1 && !is_free(&dir), "it is looked at");
    }

    /// A client opens the image before the sync of its release: its later write is synced before
    /// another program may write.
    #[test]
    fn a_client_that_comes_before_the_sync_keeps_the_image() {
        let (dir, table) = folder("1M");
        drop(open(&table).unwrap());
        let slot = table.slot();
        let opened = slot.due(Instant::now(), Duration::ZERO).expect("it is idle");
        let mut used = open(&table);
        let write = || {
            let used = used.take().unwrap();
            assert_eq!(used.image.try_write(0, &[7; BLOCK]), Ok(BLOCK));
        };
        slot.release(opened, true, write).unwrap();
        drop(used);
        assert!(!is_free(&dir), "it came");
        table.release(|| {});
        assert!(is_free(&dir), "it went");
    }

    #[test]
    fn a_release_writes_back_and_later_reads_see_other_programs_writes() {
        let (dir, table) = folder("1M");
        let used = open(&table).unwrap();
        assert_eq!(used.image.try_write(BLOCK as u64, &[7; BLOCK]), Ok(BLOCK));
        let mut bytes = [0; BLOCK];
        assert!(used.image.try_read(BLOCK as u64, &mut bytes) && bytes == [7; BLOCK]);
        drop(used);
        table.release(|| {});
        let other = other(&dir);
        other.read_exact_at(&mut bytes, BLOCK as u64).unwrap();
        assert_eq!(bytes, [7; BLOCK]);
        assert_eq!(other.metadata().unwrap().len(), 4 * BLOCK as u64);
        other.write_all_at(&[8; BLOCK], BLOCK as u64).unwrap();
        let used = open(&table).unwrap();
        assert!(!used.image.try_read(BLOCK as u64, &mut bytes), "it is not what it was");
    }

    #[test]
    fn a_released_image_of_another_length_is_opened_anew() {
        for (cache, blocks) in [("0", 1), ("0", 8), ("1M", 1), ("1M", 8)] {
            let len = (blocks * BLOCK) as u64;
            let (dir, table) = folder(cache);
            drop(open(&table).unwrap());
            let other = other(&dir);
            table.release(|| {});
            other.set_len(len).unwrap();
            assert_eq!(table.find_export("a").ok().flatten().unwrap().size, len, "--cache {cache}");
            let used = open(&table).unwrap();
            assert_eq!((used.info.size, used.image.len()), (len, len), "--cache {cache}");
            assert!(!is_free(&dir), "it is locked");
            // The size does not change while the image is used.
            other.set_len(2 * len).unwrap();
            assert_eq!(table.find_export("a").ok().flatten().unwrap().size, len);
            assert!(Arc::ptr_eq(&open(&table).unwrap().image, &used.image));
            table.sync().unwrap();
        }
    }

    #[test]
    fn only_long_idle_images_are_released() {
        let (dir, table) = folder("1M");
        let begun = Instant::now();
        let at = |seconds| {
            table
                .images
                .release_idle(begun + Duration::from_secs(seconds), Duration::from_secs(10));
        };
        let used = open(&table).unwrap();
        [0, 100, 200].into_iter().for_each(at);
        drop(used);
        [300, 305].into_iter().for_each(at);
        let slot = table.slot();
        assert!(!is_free(&dir) && !slot.state.lock().release_begun, "it is not long");
        at(320);
        drop(slot);
        wait_until(|| is_free(&dir));
        wait_until(|| {
            at(321); // once the thread has ended
            table.images.slots.lock().is_empty()
        });
    }

    #[test]
    fn opens_and_releases_at_once_lose_no_write_and_make_one_image_at_a_time() {
        const CLIENTS: usize = 3;
        let (dir, table) = folder("1M");
        drop(open(&table).unwrap());
        thread::scope(|scope| {
            let table = &table;
            let clients: [_; CLIENTS] = std::array::from_fn(|client| {
                scope.spawn(move || {
                    for round in 1..=200 {
                        let used = open(table).expect("nothing else holds the lock");
                        let at = (client * BLOCK) as u64;
                        wait_until(|| used.image.try_write(at, &[round; BLOCK]) == Ok(BLOCK));
                        drop(used);
                        thread::yield_now();
                        let used = open(table).expect("nothing else holds the lock");
                        let mut found = [0; BLOCK];
                        if !used.image.try_read(at, &mut found) {
                            used.image.file().unwrap().read_exact_at(&mut found, at).unwrap();
                        }
                        assert!(found == [round; BLOCK], "{} after {round}", found[0]);
                    }
                })
            });
            while !clients.iter().all(|client| client.is_finished()) {
                table.release(|| {});
            }
        });
        table.release(|| {});
        assert!(is_free(&dir));
        let bytes = std::fs::read(dir.path().join("a")).unwrap();
        assert!(bytes[..CLIENTS * BLOCK].iter().all(|&byte| byte == 200));
    }

    /// A file that is slow to open, as on a server that does not answer, delays its own clients
    /// only.
    #[test]
    fn a_slow_open_delays_no_other_file() {
        let (dir, table) = folder("0");
        let (images, used) = (&table.images, open(&table).unwrap());
        let slow = images.get((1, 2, 3), || {
            assert!(Arc::ptr_eq(&open(&table).unwrap().image, &used.image), "another file");
            images.release_idle(Instant::now(), Duration::ZERO);
            Err(())
        });
        assert!(slow.is_err() && !is_free(&dir));
        assert_eq!(images.slots.lock().len(), 1);
    }

    /// A device that is slow to close.
    struct SlowToDrop {
        is_dropped: Sender<()>,
        may_end: Mutex<Receiver<()>>,
    }

    impl BlockDevice for SlowToDrop {
        fn len(&self) -> u64 {
            BLOCK as u64
        }

        fn read(&self, _: u64, _: &mut [u8]) -> io::Result<usize> {
            Err(io::ErrorKind::Unsupported.into())
        }

        fn sync(&self) -> io::Result<()> {
            Ok(())
        }
    }

    impl Drop for SlowToDrop {
        fn drop(&mut self) {
            let _ = self.is_dropped.send(());
            let _ = self.may_end.lock().recv();
        }
    }

    /// The server's last sync and the description of an export do not wait for an image that is opened or
    /// dropped.
    #[test]
    fn a_slow_open_or_drop_delays_no_look() {
        let (dir, table) = folder("0");
        let (images, identity) = (&table.images, (1, 2, 3));
        let (is_dropped, dropped) = mpsc::channel();
        let (end, may_end) = mpsc::channel();
        thread::scope(|scope| {
            let end: Sender<()> = end; // dropped also by a panic
            let look = || {
                let look = scope.spawn(|| images.all().len() + images.find(&identity).iter().len());
                wait_until(|| look.is_finished());
                assert_eq!(look.join().unwrap(), 0);
            };
            let opened = images.get(identity, || {
                look();
                let device = Arc::new(SlowToDrop { is_dropped, may_end: Mutex::new(may_end) });
                let source = Source::Device(device.clone(), other(&dir));
                let backing = Backing { device, source, len: BLOCK as u64, is_buffered: false };
                table.blocks.attach("a".into(), backing)
            });
            drop(opened.unwrap());
            let release = scope.spawn(|| table.release(|| {}));
            dropped.recv().unwrap();
            look();
            assert!(!release.is_finished());
            drop(end);
        });
    }

    /// A file that hangs while its length is read delays no client that opens its image, nor does one that is slow
    /// to open delay the growth of others.
    #[test]
    fn a_look_at_a_file_that_hangs_delays_no_open() {
        let (_dir, table) = folder("0");
        let (images, used) = (&table.images, open(&table).unwrap());
        images.each(|image| {
            assert!(std::ptr::eq(image, &*used.image));
            assert!(table.slot().opening.try_lock().is_some(), "an open would wait");
        });
        for other in 0..8 {
            let (seen, sees) = mpsc::channel();
            thread::scope(|scope| {
                let slow = images.get((other, 2, 3), || {
                    scope.spawn(move || images.each(|_| seen.send(()).unwrap()));
                    let seen = sees.recv_timeout(Duration::from_secs(20));
                    Err(seen.is_ok())
                });
                assert_eq!(slow.err(), Some(true), "the other image was not looked at");
            });
        }
    }

    #[test]
    fn an_image_that_is_opened_during_a_look_grows_too() {
        let (dir, table) = folder("0");
        let long = 6 * BLOCK as u64;
        thread::scope(|scope| {
            let image = table.images.get((1, 2, 3), || {
                let opened = Backing::open(&other(&dir))?;
                other(&dir).set_len(long)?;
                scope.spawn(|| table.images.grow());
                thread::sleep(Duration::from_millis(20)); // by now a look that does not wait has ended
                table.blocks.attach("a".into(), opened)
            });
            let image = image.unwrap().unwrap();
            wait_until(|| image.len() == long);
        });
    }

    /// The server's last sync skips no image whose state a thread has locked at that time.
    #[test]
    fn a_look_misses_no_open_image() {
        let (dir, table) = folder("1M");
        let used = open(&table).unwrap();
        let slot = table.slot();
        let state = slot.state.lock();
        thread::scope(|scope| {
            let look = scope.spawn(|| table.images.all().len());
            thread::sleep(Duration::from_millis(20)); // by now a try_lock would have failed
            drop(state);
            assert_eq!(look.join().unwrap(), 1);
        });
        drop(used);
        table.release(|| assert_eq!(table.images.all().len(), 1, "it is not released yet"));
        assert!(is_free(&dir) && table.images.all().is_empty());
    }
}
