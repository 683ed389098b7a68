//! Write and read blocks in batches, and see how many complete by the time a batch is submitted.
//!
//! Run:     cargo run -p examples --example aio_reap
//! Prints:  34 requests on io_uring, 7 waits
//!          percentile                 1    10    20    30    40    50    60    70    80    90    99 99.99
//!          at once                    1     1     1     1     1     1     1     2     2     5    18    18

use aio_reap::Engine;

const BLOCK: usize = 4096;
const BLOCKS: u8 = 16;

fn main() -> std::io::Result<()> {
    let engine = Engine::new()?; // io_uring, Linux AIO or threads: whatever the system allows
    let file = engine.attach(tempfile::tempfile()?)?;
    let offsets = (0..).step_by(BLOCK);

    // The plug holds requests back; the kernel gets all of them when it drops.
    let plug = engine.plug();
    let mut writes = Vec::new();
    for (nr, at) in (1..=BLOCKS).zip(offsets.clone()) {
        writes.push(engine.write(&file, vec![nr; BLOCK], at).submit()?);
    }
    drop(plug); // submits, and reaps what is complete already
    for write in writes {
        assert_eq!(write.wait().0?, BLOCK);
    }

    // Two blocks more than there are: past the end of the file the buffer is filled with zeros.
    let plug = engine.plug();
    let mut reads = Vec::new();
    for at in offsets.take(usize::from(BLOCKS) + 2) {
        reads.push(engine.read(&file, vec![0xee; BLOCK], at).zero_fill().submit()?);
    }
    drop(plug);
    for (nr, read) in (1..=BLOCKS).chain([0, 0]).zip(reads) {
        let (bytes, block) = read.wait();
        assert_eq!((bytes?, block), (BLOCK, vec![nr; BLOCK]));
    }

    let stats = engine.stats();
    println!("{} requests on {}, {} waits", stats.completed, engine.backend(), stats.waits);
    println!("{}", stats.reap_sizes);
    assert!(stats.reap_sizes.sum() >= stats.completed && stats.completed == 34);
    Ok(())
}
