//! Tasks of a runtime with many threads make requests of an engine that has a thread of its own; and
//! an engine is driven beside local tasks.
//!
//! Run:     cargo run -p examples --example aio_reap_tokio
//! Prints:  8 tasks on the engine's remote: 800 blocks
//!          8 tasks on the engine's thread: 800 blocks

use std::rc::Rc;
use std::thread;

use aio_reap::{Engine, Remote, SharedFile};
use tokio::runtime::Builder;
use tokio::task::{JoinSet, LocalSet};

const BLOCK: usize = 512;
const TASKS: u64 = 8;
const ROUNDS: u64 = 100;

/// From any thread: write a block, read it back. The closures run on the engine's thread.
async fn copy(remote: Remote, file: SharedFile, task: u64) -> std::io::Result<u64> {
    for round in 0..ROUNDS {
        let at = (task * ROUNDS + round) * BLOCK as u64;
        let to = file.clone();
        let write = remote.ask(move |engine, responder| {
            let write = engine.write(&engine.attach_shared(&to), vec![task as u8; BLOCK], at);
            _ = write.callback(|written, block| _ = responder.send((written, block)));
        })?;
        let (written, block) = write.await?;
        assert_eq!(written?, BLOCK);
        let from = file.clone();
        let read = remote.ask(move |engine, responder| {
            let read = engine.read(&engine.attach_shared(&from), block, at);
            _ = read.callback(|read, block| _ = responder.send((read, block)));
        })?;
        let (read, block) = read.await?;
        assert_eq!((read?, &block[..]), (BLOCK, &[task as u8; BLOCK][..]));
    }
    Ok(ROUNDS)
}

fn from_many_threads() -> std::io::Result<u64> {
    let (send, receive) = std::sync::mpsc::channel();
    let engine = thread::spawn(move || {
        let engine = Engine::new()?;
        send.send(engine.remote()).expect("main waits for it");
        engine.serve() // until the last remote is gone
    });
    let remote = receive.recv().expect("an engine could be made");
    let file = SharedFile::new(tempfile::tempfile()?)?;
    let sum = Builder::new_multi_thread().build()?.block_on(async move {
        let mut tasks: JoinSet<_> =
            (0..TASKS).map(|task| copy(remote.clone(), file.clone(), task)).collect();
        drop(remote);
        let mut sum = 0;
        while let Some(blocks) = tasks.join_next().await {
            sum += blocks??;
        }
        std::io::Result::Ok(sum)
    })?;
    engine.join().expect("it does not panic")?;
    Ok(sum)
}

/// Without a hop to another thread: `run_until` turns the engine while its tasks wait.
fn beside_local_tasks() -> std::io::Result<u64> {
    let engine = Rc::new(Engine::new()?);
    let file = engine.attach(tempfile::tempfile()?)?;
    let runtime = Builder::new_current_thread().enable_io().build()?;
    let local = LocalSet::new();
    local.block_on(
        &runtime,
        engine.run_until(async {
            let mut tasks = JoinSet::new();
            for task in 0..TASKS {
                let (engine, file) = (Rc::clone(&engine), file.clone());
                tasks.spawn_local(async move {
                    for round in 0..ROUNDS {
                        let at = (task * ROUNDS + round) * BLOCK as u64;
                        let write = engine.write(&file, vec![task as u8; BLOCK], at);
                        let (written, block) = write.submit_async().await?.await;
                        assert_eq!(written?, BLOCK);
                        let (read, block) =
                            engine.read(&file, block, at).submit_async().await?.await;
                        assert_eq!((read?, &block[..]), (BLOCK, &[task as u8; BLOCK][..]));
                    }
                    std::io::Result::Ok(ROUNDS)
                });
            }
            let mut sum = 0;
            while let Some(blocks) = tasks.join_next().await {
                sum += blocks??;
            }
            Ok(sum)
        }),
    )?
}

fn main() -> std::io::Result<()> {
    let remote = from_many_threads()?;
    println!("{TASKS} tasks on the engine's remote: {remote} blocks");
    let local = beside_local_tasks()?;
    println!("{TASKS} tasks on the engine's thread: {local} blocks");
    assert_eq!((remote, local), (TASKS * ROUNDS, TASKS * ROUNDS));
    Ok(())
}
