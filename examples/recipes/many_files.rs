//! The bytes of many small files, read by a fixed number of tasks on one engine: see `many_files.md`.
//!
//! Run:     cargo run -p examples --example many_files
//! Prints:  2000 files, 3998000 bytes, 1 missing; 64 tasks

use std::cell::{Cell, RefCell};
use std::error::Error;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use aio_reap::{Engine, OpenOptions};
use tokio::task::LocalSet;

const FILES: usize = 2_000;
/// The number of tasks, of open files, and of requests in flight.
const DEPTH: usize = 64;

/// Reads a whole file into `buf`, which is reused from file to file.
async fn read_file(engine: &Engine, path: &Path, buf: &mut Vec<u8>) -> io::Result<()> {
    let file = engine.open(path, OpenOptions::read_only()).submit_async().await?.await.0?;
    let size = engine.stat(&file).submit_async().await?.await.0?.size as usize;
    let mut bytes = std::mem::take(buf); // the engine owns the buffer until the read ends
    bytes.resize(size, 0);
    let (read, bytes) = engine.read(&file, bytes, 0).submit_async().await?.await;
    *buf = bytes;
    // A close may block on some file systems: the engine makes it, and not the drop on this thread.
    let fd = file.into_fd().expect("its requests have ended");
    engine.close(fd).submit_async().await?.await.0?;
    buf.truncate(read?); // less if the file became shorter
    Ok(())
}

/// The results of all tasks.
#[derive(Default)]
struct Totals {
    files: Cell<u64>,
    bytes: Cell<u64>,
    errors: RefCell<Vec<(PathBuf, io::Error)>>,
}

fn scan(paths: impl Iterator<Item = PathBuf> + 'static) -> io::Result<Rc<Totals>> {
    let engine = Rc::new(Engine::builder().depth(DEPTH).build()?);
    let (paths, totals) = (Rc::new(RefCell::new(paths)), Rc::new(Totals::default()));
    let tasks = LocalSet::new();
    for _ in 0..DEPTH {
        let (engine, paths, totals) = (Rc::clone(&engine), Rc::clone(&paths), Rc::clone(&totals));
        tasks.spawn_local(async move {
            let mut buf = Vec::new();
            loop {
                let Some(path) = paths.borrow_mut().next() else { break }; // a borrow ends before an await
                match read_file(&engine, &path, &mut buf).await {
                    Ok(()) => {
                        totals.files.set(totals.files.get() + 1);
                        totals.bytes.set(totals.bytes.get() + buf.len() as u64);
                    }
                    Err(error) => totals.errors.borrow_mut().push((path, error)),
                }
            }
        });
    }
    engine.block_on(tasks)?; // the requests that the tasks make in one poll are one submission
    Ok(totals)
}

fn main() -> Result<(), Box<dyn Error>> {
    let folder = tempfile::tempdir()?;
    let path = folder.path().to_path_buf();
    for number in 0..FILES {
        fs::write(path.join(number.to_string()), vec![7; number * 2])?;
    }
    // One more than there are: an error ends neither the scan nor its task.
    let totals = scan((0..=FILES).map(move |number| path.join(number.to_string())))?;
    let Totals { files, bytes, errors } = &*totals;
    println!(
        "{} files, {} bytes, {} missing; {DEPTH} tasks",
        files.get(),
        bytes.get(),
        errors.borrow().len()
    );
    assert_eq!((files.get(), bytes.get()), (FILES as u64, (FILES * (FILES - 1)) as u64));
    assert_eq!(errors.borrow()[0].1.kind(), io::ErrorKind::NotFound);
    assert_eq!(errors.borrow().len(), 1);
    Ok(())
}
