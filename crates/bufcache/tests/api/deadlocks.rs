//! A thread that would wait for itself gets an error, at the latest after as long as the cache
//! waits.
#![cfg(not(offlock_model))]

use std::future::Future;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::task::{Context, Waker};
use std::thread;
use std::time::Duration;

use bufcache::{AttachOptions, BlockDevice, Cache, Device, GetError, Load};
use testkit::block_on;

const SIZE: usize = 512;
const BLOCKS: u64 = 16;

/// What a device or verifier does besides, and what it was told.
#[derive(Default)]
struct Inside {
    handle: Mutex<Option<Device>>,
    told: Mutex<Vec<GetError>>,
}

impl Inside {
    /// Asks for the block in every way that waits.
    fn ask(&self, block: u64) {
        let handle = self.handle.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let Some(handle) = handle else { return };
        let told = [
            handle.get(block).map(drop).err(),
            handle.get_mut(block).map(drop).err(),
            handle.create(block).map(drop).err(),
            handle.invalidate(block).map(drop).err(),
        ];
        self.told.lock().unwrap().extend(told.into_iter().map(|told| told.expect("refused")));
    }

    fn assert_told(&self) {
        let told = std::mem::take(&mut *self.told.lock().unwrap());
        assert_eq!(told, [GetError::WouldDeadlock; 4]);
    }
}

struct Disk {
    inside: Arc<Inside>,
    /// It asks while it reads; else the verifier does.
    asks: bool,
    /// Reads end when they begin.
    begins: AtomicBool,
}

impl BlockDevice for Disk {
    fn len(&self) -> u64 {
        BLOCKS * SIZE as u64
    }

    fn read(&self, offset: u64, buf: &mut [u8]) -> io::Result<usize> {
        let block = offset / SIZE as u64;
        if self.asks {
            self.inside.ask(block);
        }
        buf.fill(block as u8);
        Ok(buf.len())
    }

    fn begin_read(&self, mut load: Load) {
        if !self.begins.load(Ordering::Relaxed) {
            return load.defer();
        }
        let block = load.offset() / SIZE as u64;
        load.fill(block as u8);
        let read = load.len();
        load.finish(Ok(read));
    }
}

fn new(asks: bool, begins: bool) -> (Arc<Inside>, Arc<Disk>, Device) {
    let builder = Cache::builder(8 * SIZE).block_size(SIZE);
    let cache = builder.patience(Duration::from_millis(200)).build().unwrap();
    let inside = Arc::new(Inside::default());
    let begins = AtomicBool::new(begins);
    let disk = Arc::new(Disk { inside: Arc::clone(&inside), asks, begins });
    let mut options = AttachOptions::new();
    if !asks {
        let inside = Arc::clone(&inside);
        options = options.verify(move |block, _| {
            inside.ask(block);
            true
        });
    }
    let device = cache.attach_with(Arc::clone(&disk), options).unwrap();
    (inside, disk, device)
}

/// For each kind of read: by the thread of the get, by the pool, or begun by the device.
#[test]
fn a_device_or_verifier_that_asks_for_the_block_it_is_at_is_told() {
    for (asks, begins) in [(false, false), (true, false), (false, true)] {
        let (inside, _disk, device) = new(asks, begins);
        *inside.handle.lock().unwrap() = Some(device.clone());
        assert_eq!(device.get(3).unwrap()[0], 3);
        inside.assert_told();
        assert_eq!(block_on(device.get_async(4)).unwrap()[0], 4);
        inside.assert_told();
        drop(device.get_mut(5).unwrap());
        inside.assert_told();
        *inside.handle.lock().unwrap() = None; // it keeps the device, which keeps it
        assert_eq!(device.get(6).unwrap()[0], 6);
    }
}

#[test]
fn a_get_of_a_block_that_its_thread_has_claimed_is_refused() {
    for begins in [false, true] {
        let (_inside, disk, device) = new(false, begins);
        let mut load = device.claim(3).unwrap().unwrap();
        load.fill(3);
        let told = [
            device.get(3).map(drop).unwrap_err(),
            device.get_mut(3).map(drop).unwrap_err(),
            device.create(3).map(drop).unwrap_err(),
            device.invalidate(3).map(drop).unwrap_err(),
        ];
        assert_eq!(told, [GetError::WouldDeadlock; 4]);
        assert!(device.discard(2..5).is_err());
        load.finish(Ok(SIZE));
        assert_eq!(device.get(3).unwrap()[SIZE - 1], 3);
        disk.begins.store(false, Ordering::Relaxed);
    }
}

/// The claimer waits for another thread, as long as that takes if that is not too long.
#[test]
fn a_thread_that_has_sent_the_load_away_waits_for_it() {
    let (_inside, _disk, device) = new(false, false);
    thread::scope(|scope| {
        let (give, given) = mpsc::channel::<Load>();
        scope.spawn(move || {
            let mut load = given.recv().unwrap();
            thread::sleep(Duration::from_millis(30));
            load.fill(3);
            load.finish(Ok(SIZE));
        });
        give.send(device.claim(3).unwrap().unwrap()).unwrap();
        let mut got = device.get(3);
        while let Err(GetError::WouldDeadlock) = got {
            got = device.get(3); // on a busy machine
        }
        assert_eq!(got.unwrap()[0], 3);
        let (give, given) = mpsc::channel::<Load>();
        scope.spawn(move || {
            let mut load = given.recv().unwrap();
            thread::sleep(Duration::from_millis(600));
            load.fill(4);
            load.finish(Ok(SIZE));
        });
        give.send(device.claim(4).unwrap().unwrap()).unwrap();
        // Others wait as for any load.
        let device = &device;
        scope.spawn(move || assert_eq!(device.get(4).unwrap()[0], 4));
    });
}

#[test]
fn a_writer_that_gets_its_block_is_refused_also_if_the_device_begins_reads() {
    for begins in [false, true] {
        let (_inside, _disk, device) = new(false, begins);
        let guard = device.get_mut(3).unwrap();
        assert_eq!(device.get(3).map(drop).unwrap_err(), GetError::WouldDeadlock);
        assert_eq!(device.get_mut(3).map(drop).unwrap_err(), GetError::WouldDeadlock);
        drop(guard);
        let guard = device.create(4).unwrap();
        assert_eq!(device.create(4).map(drop).unwrap_err(), GetError::WouldDeadlock);
        drop(guard);
        assert_eq!(device.get(4).unwrap()[0], 0);
    }
}

type Task<T> = std::pin::Pin<Box<dyn Future<Output = T> + Send>>;

/// Begins a task on the thread that reads the device, before it reads.
#[derive(Default)]
struct Begins(Mutex<Option<Box<dyn FnOnce() + Send>>>);

impl BlockDevice for Begins {
    fn len(&self) -> u64 {
        BLOCKS * SIZE as u64
    }

    fn read(&self, _: u64, buf: &mut [u8]) -> io::Result<usize> {
        let begin = self.0.lock().unwrap().take();
        begin.into_iter().for_each(|begin| begin());
        buf.fill(1);
        Ok(buf.len())
    }

    fn discard(&self, _: u64, _: u64) -> io::Result<()> {
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        Ok(())
    }
}

/// The thread has a hazard slot of the block, which is not the task's: the task waits.
#[test]
fn a_task_that_a_reader_of_its_block_polls_waits() {
    let device = Arc::new(Begins::default());
    let cache = Cache::builder(8 * SIZE).block_size(SIZE).build().unwrap();
    let disk = cache.attach(Arc::clone(&device)).unwrap();
    let (send, tasks) = mpsc::channel();
    let begin = move |mut task: Task<Result<(), String>>| {
        let polled = task.as_mut().poll(&mut Context::from_waker(Waker::noop()));
        assert!(polled.is_pending(), "{polled:?}");
        send.send(task).unwrap();
    };
    let (own, begin_inside) = (disk.clone(), begin.clone());
    *device.0.lock().unwrap() = Some(Box::new(move || {
        let discards = own.clone();
        begin_inside(Box::pin(async move {
            discards.discard_async(3..4).await.map_err(|error| format!("discard: {error}"))
        }));
        begin_inside(Box::pin(async move {
            own.get_mut_async(3).await.map(drop).map_err(|error| format!("write: {error}"))
        }));
    }));
    drop(disk.get(3));
    let end = |tasks: &mpsc::Receiver<Task<Result<(), String>>>| {
        let ends = tasks.try_iter().map(|task| thread::spawn(move || block_on(task)));
        let ends: Vec<_> = ends.collect();
        assert!(ends.into_iter().all(|end| end.join().unwrap() == Ok(())));
    };
    end(&tasks);
    let guard = disk.get(3).unwrap();
    let own = disk.clone();
    begin(Box::pin(async move {
        own.get_mut_async(3).await.map(drop).map_err(|error| format!("beside a guard: {error}"))
    }));
    drop(guard);
    end(&tasks);
}
