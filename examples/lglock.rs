//! Keep a list of open files per CPU: a thread adds to the list of its own CPU, closes a file in
//! whichever list it is, and looks at all of them at one moment.
//!
//! Run:     cargo run -p examples --example lglock
//! Prints:  while they ran: 3 open in 2 lists
//!          4 threads opened 40000 files and left 4 open

use std::thread;

use offlock_percpu::{LgLock, LockError};

const FILES: u32 = 10_000; // per thread

/// Opens every file, and closes all but the last.
fn work(open: &LgLock<Vec<(u32, u32)>>, id: u32) -> Result<(), LockError> {
    for file in 0..FILES {
        let mut list = open.local()?; // this CPU's, and still the same if the thread moves
        list.push((id, file));
        let cpu = list.cpu();
        drop(list);
        if file + 1 < FILES {
            open.local_on(cpu)?.retain(|&entry| entry != (id, file)); // from any CPU
        }
    }
    Ok(())
}

fn main() -> Result<(), LockError> {
    let open = LgLock::new(|_cpu| Vec::new());
    thread::scope(|s| {
        let open = &open;
        let threads = [0, 1, 2, 3].map(|id| s.spawn(move || work(open, id)));
        let all = open.global()?; // every list at once: nothing is opened or closed meanwhile
        let count: usize = all.iter().map(|(_cpu, list)| list.len()).sum();
        println!("while they ran: {count} open in {} lists", all.capacity());
        assert!(count <= 4);
        drop(all); // or they would wait for ever
        threads.into_iter().try_for_each(|thread| thread.join().unwrap())
    })?;
    let left: usize = open.global()?.iter().map(|(_cpu, list)| list.len()).sum();
    println!("4 threads opened {} files and left {left} open", 4 * FILES);
    assert_eq!(left, 4);
    Ok(())
}
