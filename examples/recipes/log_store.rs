//! A table of numbers on disk, with a write-ahead log and checkpoints: see `log_store.md`.
//!
//! Run:     cargo run -p examples --example log_store
//! Prints:  a crash after 1280 commits: each of them is there

use std::error::Error;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::rc::Rc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use aio_reap::Engine;
use bufcache::{AttachOptions, Cache, Device, FileDevice, Wal, lend_engine};
use rustix::fs::{FallocateFlags, fallocate};
use tokio::task::LocalSet;

const TASKS: u64 = 64;
const ROUNDS: u64 = 20; // changes of each task
const PAGE_KEYS: u64 = 4096 / 8;
const KEYS: u64 = TASKS * PAGE_KEYS; // a page for each task
const RECORD: u64 = 32; // its number, key, value, padding: never in two sectors

/// The record `lsn` lies at `lsn * RECORD`. The first word of the file is the number of the oldest record.
struct Log {
    file: File,
    /// The number of the next record, and the records that are in memory only.
    tail: Mutex<(u64, Vec<u8>)>,
    flushing: Mutex<()>,
    durable: AtomicU64,
}

impl Log {
    fn append(&self, key: u64, value: u64, before: impl FnOnce(u64)) -> u64 {
        let (next, records) = &mut *self.tail.lock().unwrap();
        let lsn = *next;
        before(lsn);
        *next += 1;
        records.extend([lsn, key, value, 0].into_iter().flat_map(u64::to_le_bytes));
        lsn
    }

    fn delete_before(&self, lsn: u64) -> io::Result<()> {
        self.file.write_all_at(&lsn.to_le_bytes(), 0)?;
        self.file.sync_data()?; // a replay must not begin in the hole
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        Ok(fallocate(&self.file, flags, 8, lsn * RECORD - 8)?)
    }
}

impl Wal for Log {
    fn durable(&self) -> u64 {
        self.durable.load(Ordering::Acquire)
    }

    fn flush(&self, lsn: u64) -> io::Result<()> {
        let _one = self.flushing.lock().unwrap(); // the next one may find its record durable
        if lsn <= self.durable() {
            return Ok(());
        }
        let (next, records) = self.tail.lock().unwrap().clone(); // stay there: an error loses none
        self.file.write_all_at(&records, (self.durable() + 1) * RECORD)?;
        self.file.sync_data()?;
        self.tail.lock().unwrap().1.drain(..records.len());
        self.durable.store(next - 1, Ordering::Release);
        Ok(())
    }
}

struct Store {
    pages: Device,
    log: Arc<Log>,
}

impl Store {
    fn open(folder: &Path, cache: &Cache) -> Result<Self, Box<dyn Error>> {
        let mut options = OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false);
        let open = |name| options.open(folder.join(name));
        let (pages, file, bytes) = (open("pages")?, open("log")?, fs::read(folder.join("log"))?);
        pages.set_len(KEYS * 8)?;
        let word = |bytes: &[u8]| u64::from_le_bytes(bytes.try_into().unwrap());
        let words: Vec<u64> = bytes.chunks_exact(8).map(word).collect();
        let first = words.first().map_or(1, |first| (*first).max(1));
        let records = words.chunks_exact(4).skip(first as usize).zip(first..);
        let kept: Vec<_> = records.take_while(|(record, lsn)| record[0] == *lsn).collect();
        let end = first + kept.len() as u64;
        file.set_len(end * RECORD)?; // those behind a missing record must not follow the next ones
        let (tail, durable) = (Mutex::new((end, Vec::new())), AtomicU64::new(end - 1));
        let log = Arc::new(Log { file, tail, flushing: Mutex::default(), durable });
        let options = AttachOptions::new().wal(Arc::clone(&log) as Arc<dyn Wal>);
        let pages = cache.attach_with(FileDevice::new(pages)?, options)?;
        for (record, _) in kept {
            write(&mut pages.get_mut(record[1] / PAGE_KEYS)?, record[1], record[2]);
        }
        pages.sync()?;
        log.delete_before(end)?;
        Ok(Self { pages, log })
    }

    async fn put(&self, key: u64, value: u64) -> io::Result<u64> {
        let mut page = self.pages.get_mut_async(key / PAGE_KEYS).await?;
        let lsn = self.log.append(key, value, |lsn| page.set_lsn(lsn)); // before the record exists
        write(&mut page, key, value);
        Ok(lsn)
    }

    async fn commit(&self, lsn: u64) -> io::Result<()> {
        let log = Arc::clone(&self.log);
        self.pages.call_async(move |_| log.flush(lsn)).await // blocks a thread of the cache
    }

    async fn checkpoint(&self) -> io::Result<()> {
        let end = self.log.tail.lock().unwrap().0;
        let needed = self.pages.oldest_lsn().unwrap_or(end).min(end); // before the sync
        self.pages.sync_async().await?;
        self.log.delete_before(needed)
    }
}

fn write(page: &mut [u8], key: u64, value: u64) {
    page[(key % PAGE_KEYS) as usize * 8..][..8].copy_from_slice(&value.to_le_bytes());
}

fn main() -> Result<(), Box<dyn Error>> {
    let (folder, crashed) = (tempfile::tempdir()?, tempfile::tempdir()?);
    // Half of the pages. A put fails if the disk frees no buffer within the patience, a second by default.
    let cache = Cache::builder(32 * 4096).patience(Duration::from_secs(60)).build()?;
    let store = Rc::new(Store::open(folder.path(), &cache)?);
    let engine = Rc::new(Engine::new()?);
    let tasks = LocalSet::new();
    for task in 0..TASKS {
        let store = Rc::clone(&store);
        tasks.spawn_local(async move {
            for round in 1..=ROUNDS {
                let lsn = store.put(task * PAGE_KEYS, round).await.unwrap();
                store.commit(lsn).await.unwrap();
                if task == 0 && round.is_multiple_of(6) {
                    store.checkpoint().await.unwrap();
                }
            }
        });
    }
    let lent = lend_engine(&engine);
    engine.block_on(tasks)?;
    drop(lent);

    // What a crash at this moment leaves: changes of the last rounds are only in the cache and the log.
    for name in ["pages", "log"] {
        fs::copy(folder.path().join(name), crashed.path().join(name))?;
    }
    let again = Store::open(crashed.path(), &cache)?;
    for task in 0..TASKS {
        assert_eq!(again.pages.get(task)?[..8], ROUNDS.to_le_bytes(), "task {task}");
    }
    println!("a crash after {} commits: each of them is there", TASKS * ROUNDS);
    Ok(())
}
