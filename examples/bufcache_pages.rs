//! A page store with a log: pages are changed in the cache, and come to the device only behind the log
//! records that speak of them. Then the power goes, at every moment there was, and each time
//! everything that was committed is there.
//!
//! Run:     cargo run -p examples --example bufcache_pages
//! Prints:  what the cache counts
//!          7290 images of 2470 moments: every commit is in each

use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, Mutex};

use bufcache::{AttachOptions, BlockDevice, Cache, Device, MemoryDevice, Wal};
use bufcache_test::FaultDevice;

const PAGE: usize = 4096;
const PAGES: u64 = 64;
/// The log lies behind the pages, a record in each of its sectors.
const LOG: u64 = PAGES * PAGE as u64;
const SECTOR: usize = 512;
const RECORDS: usize = 2000;

type Disk = Arc<FaultDevice<MemoryDevice>>;

/// "That page has that value from now on."
#[derive(Clone, Copy, Debug, PartialEq)]
struct Record {
    lsn: u64,
    page: u64,
    value: u64,
}

impl Record {
    fn to_sector(self) -> [u8; SECTOR] {
        let mut sector = [0; SECTOR];
        let check = self.lsn ^ self.page ^ self.value ^ 0x5eed;
        for (at, number) in [self.lsn, self.page, self.value, check].into_iter().enumerate() {
            sector[at * 8..][..8].copy_from_slice(&number.to_le_bytes());
        }
        sector
    }

    fn from_sector(sector: &[u8]) -> Option<Self> {
        let [lsn, page, value, check] = [0, 8, 16, 24].map(|at| number(&sector[at..]));
        (lsn != 0 && check == lsn ^ page ^ value ^ 0x5eed).then_some(Self { lsn, page, value })
    }
}

fn number(bytes: &[u8]) -> u64 {
    u64::from_le_bytes(bytes[..8].try_into().expect("eight bytes"))
}

/// A log in memory up to its last record, and on the device up to `durable`.
struct Log {
    disk: Disk,
    records: Mutex<(Vec<Record>, u64)>,
}

impl Log {
    fn append(&self, page: u64, value: u64) -> u64 {
        let mut state = self.records.lock().expect("no panic");
        let lsn = state.0.len() as u64 + 1;
        state.0.push(Record { lsn, page, value });
        lsn
    }
}

impl Wal for Log {
    fn durable(&self) -> u64 {
        self.records.lock().expect("no panic").1
    }

    fn flush(&self, lsn: u64) -> io::Result<()> {
        let mut state = self.records.lock().expect("no panic");
        let (records, durable) = &mut *state;
        if lsn <= *durable {
            return Ok(()); // another commit or write-back was first, and went further
        }
        for record in &records[*durable as usize..lsn as usize] {
            self.disk.write(LOG + (record.lsn - 1) * SECTOR as u64, &record.to_sector())?;
        }
        self.disk.sync()?;
        *durable = lsn;
        Ok(())
    }
}

struct Store {
    pages: Device,
    log: Arc<Log>,
}

impl Store {
    fn open(disk: &Disk, cache: &Cache) -> io::Result<Self> {
        let log = Arc::new(Log { disk: Arc::clone(disk), records: Mutex::default() });
        let options = AttachOptions::new().wal(Arc::clone(&log) as Arc<dyn Wal>);
        let pages = cache.attach_with(Arc::clone(disk), options).map_err(io::Error::other)?;
        Ok(Self { pages, log })
    }

    /// Changes a page: in the log first, then in the cache, where it says how far the log must be.
    fn put(&self, page: u64, value: u64) -> io::Result<u64> {
        let mut guard = self.pages.get_mut(page)?;
        let lsn = self.log.append(page, value);
        guard[..8].copy_from_slice(&lsn.to_le_bytes());
        guard[8..16].copy_from_slice(&value.to_le_bytes());
        guard.set_lsn(lsn);
        Ok(lsn)
    }

    /// Everything up to that record is there from now on; the pages need not be written for that.
    fn commit(&self, lsn: u64) -> io::Result<()> {
        self.log.flush(lsn)
    }
}

/// Returns the values of the store after a loss of power: its pages, with the log played over them.
fn recover(image: &[u8]) -> Result<BTreeMap<u64, u64>, String> {
    let records: Vec<_> =
        image[LOG as usize..].chunks(SECTOR).map_while(Record::from_sector).collect();
    let mut values = BTreeMap::new();
    for page in 0..PAGES {
        let bytes = &image[page as usize * PAGE..];
        let (lsn, value) = (number(bytes), number(&bytes[8..]));
        if lsn > records.len() as u64 {
            return Err(format!("page {page} is at {lsn}, the log ends at {}", records.len()));
        }
        values.insert(page, (lsn, value));
    }
    for record in records {
        let page = values.entry(record.page).or_default();
        if record.lsn > page.0 {
            *page = (record.lsn, record.value);
        }
    }
    Ok(values.into_iter().map(|(page, (_, value))| (page, value)).collect())
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let bytes = LOG as usize + RECORDS * SECTOR;
    let disk = Arc::new(FaultDevice::new(MemoryDevice::new(vec![0; bytes])));
    disk.record()?;
    // Room for a quarter of the pages: the others are written back while the store is at work.
    let cache = Cache::new(PAGES as usize / 4 * PAGE)?;
    let store = Store::open(&disk, &cache)?;

    let mut random = 88_172_645_463_325_252_u64;
    let mut now = BTreeMap::new();
    // What was committed from which moment on.
    let mut committed = vec![(0, BTreeMap::new())];
    for value in 1..=400 {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        let page = random % PAGES;
        let lsn = store.put(page, value)?;
        now.insert(page, value);
        if value % 7 == 0 {
            store.commit(lsn)?;
            committed.push((disk.moments(), now.clone()));
        }
    }

    let mut images = 0;
    for moment in 0..=disk.moments() {
        let since = committed.partition_point(|(since, _)| *since <= moment) - 1;
        for way in 0..3_usize {
            let choose = |sector: u64, versions: usize| match way {
                0 => 0,
                1 => versions,
                _ => sector as usize % versions,
            };
            let image = disk.after_power_cut(moment, choose).ok_or("nothing was recorded")?;
            let values = recover(&image)?;
            for (page, least) in &committed[since].1 {
                if values[page] < *least {
                    return Err(format!("moment {moment}: page {page} lost {least}").into());
                }
            }
            images += 1;
        }
    }
    println!("{}", cache.stats());
    println!("{images} images of {} moments: every commit is in each", disk.moments());
    store.pages.close()?;
    Ok(())
}
