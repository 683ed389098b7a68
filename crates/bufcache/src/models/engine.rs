//! Loads in the engines of threads that wait for each other.

use std::cell::RefCell;
use std::io;
use std::sync::Arc;

use crate::{BlockDevice, Device, GetError, Load};
use offlock_sync::{model, thread_local};

use super::world::{BLOCKS, LONG, SIZE, attach, beside, builder, look};

type Read = Box<dyn FnOnce()>;

thread_local! {
    /// The reads in the engine of this thread, which end when the thread turns it.
    static ENGINE: RefCell<Vec<Read>> = RefCell::new(Vec::new());
}

/// Turns the engine of this thread until no read is left.
fn drain() {
    while let Some(read) = ENGINE.with(|engine| engine.borrow_mut().pop()) {
        read();
    }
}

/// Numbered blocks. Those that no thread blocks for are read by the engine of the thread that asks.
struct ByEngine;

impl BlockDevice for ByEngine {
    fn len(&self) -> u64 {
        BLOCKS * SIZE as u64
    }

    fn read(&self, offset: u64, buf: &mut [u8]) -> io::Result<usize> {
        buf.fill((offset / SIZE as u64) as u8);
        Ok(buf.len())
    }

    fn begin_read(&self, mut load: Load) {
        if load.is_blocking() {
            return load.defer();
        }
        let counted = load.enter_engine();
        let read: Read = Box::new(move || {
            drop(counted);
            let byte = (load.offset() / SIZE as u64) as u8;
            load.fill(byte);
            load.finish(Ok(SIZE));
        });
        ENGINE.with(|engine| engine.borrow_mut().push(read));
    }
}

/// Gets a block, which this thread may read itself or wait for, unless it is refused that.
fn get(device: &Device, block: u64) {
    match device.get(block) {
        Ok(guard) => look(&guard, block),
        Err(error) => assert_eq!(error, GetError::WouldDeadlock),
    }
}

/// Each begins a load, and then wants what the other may have begun.
#[test]
fn inv02_loads_that_are_crossed() {
    model(|| {
        let device = attach(builder(3, LONG), &Arc::new(ByEngine)); // one for the get that loses the race
        device.readahead(1..2);
        let other = beside(&device, |device| {
            device.readahead(2..3);
            get(&device, 1);
            drain();
        });
        get(&device, 2);
        drain();
        other.join().unwrap();
    });
}
