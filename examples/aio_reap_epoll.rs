//! An engine beside a socket in an event loop: its descriptor is readable when it wants a turn.
//!
//! Run:     cargo run -p examples --example aio_reap_epoll
//! Prints:  1000 blocks read for a client, 0 of them wrong

use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::rc::Rc;
use std::thread;

use aio_reap::Engine;
use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};

const BLOCK: usize = 512;
const BLOCKS: u8 = 250;
const SOCKET: u64 = 1;
const ENGINE: u64 = 2;

/// Answers the number of a block with the block, until the client is gone.
fn serve(socket: UnixStream, file: std::fs::File) -> std::io::Result<()> {
    let engine = Engine::new()?;
    let (file, socket) = (engine.attach(file)?, Rc::new(socket));
    let epoll = epoll::create(CreateFlags::CLOEXEC)?;
    epoll::add(&epoll, &socket, EventData::new_u64(SOCKET), EventFlags::IN)?;
    epoll::add(&epoll, engine.as_fd(), EventData::new_u64(ENGINE), EventFlags::IN)?;
    let mut events = Vec::with_capacity(16);
    loop {
        epoll::wait(&epoll, rustix::buffer::spare_capacity(&mut events), None)?;
        for event in events.drain(..) {
            if event.data.u64() == ENGINE {
                engine.turn(); // reaps, and runs the callbacks
                continue;
            }
            let mut numbers = [0; 64];
            let count = (&*socket).read(&mut numbers)?;
            if count == 0 {
                return Ok(());
            }
            let _plug = engine.plug(); // one submission for all that were asked for
            for &nr in &numbers[..count] {
                let reply = Rc::clone(&socket);
                let done = move |result: Result<usize, aio_reap::RequestError>, block: Vec<u8>| {
                    assert_eq!(result.unwrap(), BLOCK);
                    (&*reply).write_all(&block).unwrap();
                };
                engine.read(&file, vec![0; BLOCK], u64::from(nr) * BLOCK as u64).callback(done)?;
            }
        }
    }
}

fn main() -> std::io::Result<()> {
    let file = tempfile::tempfile()?;
    (0..BLOCKS).try_for_each(|nr| file.write_all_at(&[nr; BLOCK], u64::from(nr) * BLOCK as u64))?;
    let (ours, mut client) = UnixStream::pair()?;
    let server = thread::spawn(move || serve(ours, file));
    let (mut read, mut wrong) = (0, 0);
    for round in 0..250u8 {
        client.write_all(&[round, 249 - round, round / 2, 7])?; // answered in any order
        let mut sum = 0;
        for _ in 0..4 {
            let mut block = [0; BLOCK];
            client.read_exact(&mut block)?;
            read += 1;
            wrong += u32::from(block != [block[0]; BLOCK]);
            sum += u32::from(block[0]);
        }
        wrong += u32::from(sum != 256 + u32::from(round / 2));
    }
    drop(client);
    server.join().unwrap()?;
    println!("{read} blocks read for a client, {wrong} of them wrong");
    assert_eq!((read, wrong), (1000, 0));
    Ok(())
}
