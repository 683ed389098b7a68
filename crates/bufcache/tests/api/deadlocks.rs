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

fn attach(device: impl IntoDevice, options: AttachOptions) -> Device {
    let builder = Cache::builder(8 * SIZE).block_size(SIZE);
    builder.patience(SHORT).build().unwrap().attach_with(device, options).unwrap()
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
        attach(device, options.verify(move |block, _| asking.ask(block)))
    } else if asks {
        let device = memory();
        device.on_operation(move |_, offset| _ = asking.ask(offset / SIZE as u64));
        attach(device, options)
    } else {
        attach(memory(), options.verify(move |block, _| asking.ask(block)))
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

/// The thread that reads the device for a block has a hazard slot of it, which is not that of a task that it polls.
#[test]
fn a_task_that_a_reader_of_its_block_polls_waits() {
    let device = Arc::new(memory());
    let disk = attach(Arc::clone(&device), AttachOptions::new());
    let told = Arc::new(Mutex::new(Vec::new()));
    let (own, tell) = (disk.clone(), Arc::clone(&told));
    device.on_operation(move |operation, _| {
        if operation == Operation::Read {
            let mut context = Context::from_waker(Waker::noop());
            let discards = pin!(own.discard_async(3..4)).poll(&mut context).is_pending();
            let locks = pin!(own.get_mut_async(3)).poll(&mut context).is_pending();
            tell.lock().unwrap().push((discards, locks));
        }
    });
    drop(disk.get(3));
    device.on_operation(|_, _| ()); // the hook keeps the device, which keeps it
    assert_eq!(told.lock().unwrap()[0], (true, true));
}
