//! A thread that would wait for itself gets an error, at the latest after as long as the cache
//! waits.

use std::sync::PoisonError;

use crate::world::*;

const SIZE: usize = 512;
const BLOCKS: u64 = 16;

/// What a device or verifier does besides, and what it was told.
#[derive(Default)]
struct Inside {
    handle: Mutex<Option<Device>>,
    told: Mutex<Vec<GetError>>,
}

impl Inside {
    /// Asks for the block in every way that waits. Returns true.
    fn ask(&self, block: u64) -> bool {
        let handle = self.handle.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let Some(handle) = handle else { return true };
        let told = [
            handle.get(block).map(drop).err(),
            handle.get_mut(block).map(drop).err(),
            handle.create(block).map(drop).err(),
            handle.invalidate(block).map(drop).err(),
        ];
        self.told.lock().unwrap().extend(told.into_iter().map(|told| told.expect("refused")));
        true
    }

    fn assert_told(&self) {
        let told = std::mem::take(&mut *self.told.lock().unwrap());
        assert_eq!(told, [GetError::WouldDeadlock; 4]);
    }
}

/// The cache waits as long as this for a block of another thread.
const SHORT: Duration = Duration::from_millis(200);
/// Much longer than anything takes that is waited for.
const LONG: Duration = Duration::from_secs(60);

fn attach(device: impl IntoDevice, options: AttachOptions, patience: Duration) -> Device {
    let builder = Cache::builder(8 * SIZE).block_size(SIZE);
    builder.patience(patience).build().unwrap().attach_with(device, options).unwrap()
}

fn memory() -> FaultDevice<MemoryDevice> {
    FaultDevice::new(MemoryDevice::new(vec![1; BLOCKS as usize * SIZE]))
}

/// Either the device asks while it reads, or the verifier does; reads end when they begin, or block.
fn new(asks: bool, begins: bool) -> (Arc<Inside>, Device) {
    let inside = Arc::new(Inside::default());
    let asking = Arc::clone(&inside);
    let options = AttachOptions::new();
    let device = if begins {
        let device = KeptDevice::new(BLOCKS as usize * SIZE);
        device.does(Begun::Ended);
        attach(device, options.verify(move |block, _| asking.ask(block)), SHORT)
    } else if asks {
        let device = memory();
        device.on_operation(move |_, offset| _ = asking.ask(offset / SIZE as u64));
        attach(device, options, SHORT)
    } else {
        attach(memory(), options.verify(move |block, _| asking.ask(block)), SHORT)
    };
    (inside, device)
}

/// For each kind of read: by the thread of the get, by the pool, or begun by the device.
#[test]
fn a_device_or_verifier_that_asks_for_the_block_it_is_at_is_told() {
    for (asks, begins) in [(false, false), (true, false), (false, true)] {
        let (inside, device) = new(asks, begins);
        *inside.handle.lock().unwrap() = Some(device.clone());
        assert_eq!(device.get(3).unwrap()[0], 1);
        inside.assert_told();
        assert_eq!(block_on(device.get_async(4)).unwrap()[0], 1);
        inside.assert_told();
        drop(device.get_mut(5).unwrap());
        inside.assert_told();
        *inside.handle.lock().unwrap() = None; // it keeps the device, which keeps it
        assert_eq!(device.get(6).unwrap()[0], 1);
    }
}

/// The claimer waits for another thread, as long as that takes if that is not too long.
#[test]
fn a_thread_that_has_sent_the_load_away_waits_for_it() {
    let (_inside, device) = new(false, false);
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
    });
}

type Task<T> = std::pin::Pin<Box<dyn Future<Output = T> + Send>>;

/// The thread has a hazard slot of the block, which is not the task's: the task waits.
#[test]
fn a_task_that_a_reader_of_its_block_polls_waits() {
    let device = Arc::new(memory());
    let disk = attach(Arc::clone(&device), AttachOptions::new(), LONG);
    let (send, tasks) = mpsc::channel();
    let begin = move |mut task: Task<Result<(), String>>| {
        let polled = task.as_mut().poll(&mut Context::from_waker(Waker::noop()));
        assert!(polled.is_pending(), "{polled:?}");
        send.send(task).unwrap();
    };
    let (own, begin_inside) = (disk.clone(), begin.clone());
    let inside = Mutex::new(Some(move || {
        let discards = own.clone();
        begin_inside(Box::pin(async move {
            discards.discard_async(3..4).await.map_err(|error| format!("discard: {error}"))
        }));
        begin_inside(Box::pin(async move {
            own.get_mut_async(3).await.map(drop).map_err(|error| format!("write: {error}"))
        }));
    }));
    // On the thread that reads the device, before it reads.
    device.on_operation(move |_, _| {
        let begin = inside.lock().unwrap().take();
        begin.into_iter().for_each(|begin| begin());
    });
    drop(disk.get(3));
    let ends = tasks.try_iter().map(|task| thread::spawn(move || block_on(task)));
    let ends: Vec<_> = ends.collect();
    assert!(ends.into_iter().all(|end| end.join().unwrap() == Ok(())));
}
