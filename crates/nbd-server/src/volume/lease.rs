//! The object beside a volume that says whether a server has the volume open.
//!
//! It protects nothing: the database does, by fencing. It keeps a second server from taking a
//! volume over by mistake. A server writes the object again and again; one that finds the object
//! waits for a change, and refuses the volume if there is one.
//!
//! A second object asks the server for a snapshot: only the server that has the volume open knows up to where
//! the log is confirmed. It looks for that object when it renews the first, and deletes it once the snapshot is there.

use std::fs;
use std::sync::Arc;
use std::time::Duration;

use object_store::path::Path;
use object_store::{Error, ObjectStore, ObjectStoreExt};
use slatedb::admin::Admin;
use slatedb::config::{CheckpointOptions, CheckpointScope};
use slatedb::{Checkpoint, Db};
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep};
use tracing::{info, warn};

use super::store::{sent, shown};

/// How often a server writes the object.
pub(super) const RENEWAL: Duration = Duration::from_secs(40);
/// How long an object without a change is taken for that of a running server. Two renewals
/// may be late.
const SILENCE: Duration = Duration::from_secs(100);
/// How often a server that waits reads the object.
const LOOK: Duration = Duration::from_secs(2);

/// The word of a server that has closed the volume.
const CLOSED: &str = "closed";

/// The object of a running server. A task renews it until this is dropped.
pub(super) struct Lease {
    store: Arc<dyn ObjectStore>,
    path: Path,
    renewal: JoinHandle<()>,
}

impl Lease {
    /// Writes the object, and begins to renew it. The volume works without it, so a failure is
    /// logged only. Carries out the requests for snapshots that it finds meanwhile.
    pub(super) async fn begin(
        store: Arc<dyn ObjectStore>,
        path: Path,
        snapshots: Option<SnapshotRequests>,
    ) -> Self {
        renew(&*store, &path, 0).await;
        let (to, at) = (Arc::clone(&store), path.clone());
        let renewal = tokio::spawn(async move {
            for number in 1_u64.. {
                if let Some(snapshots) = &snapshots {
                    snapshots.answer().await;
                }
                sleep(RENEWAL).await;
                renew(&*to, &at, number).await;
            }
        });
        Self { store, path, renewal }
    }

    /// Tells other servers that the volume is closed, unless another one has taken it over.
    pub(super) async fn end(self) {
        self.renewal.abort();
        let closed = async {
            let text = sent(|| async { self.store.get(&self.path).await?.bytes().await }).await?;
            if text.starts_with(holder().as_bytes()) {
                sent(|| self.store.put(&self.path, CLOSED.into())).await?;
            }
            Ok::<_, Error>(())
        };
        // A server that finds the old object waits longer.
        let _ = tokio::time::timeout(RENEWAL, closed).await;
    }
}

/// Writes the object.
async fn renew(store: &dyn ObjectStore, path: &Path, number: u64) {
    let text = format!("{}\n{number}\n", holder());
    if let Err(error) = sent(|| store.put(path, text.clone().into())).await {
        let error = shown(&error);
        warn!(error, "the object that tells other servers of this one is not written");
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.renewal.abort();
    }
}

/// Returns whether another server has the volume open. Waits for up to [`SILENCE`] for a sign of a
/// server of another machine that did not close it.
pub(super) async fn is_held(store: &dyn ObjectStore, path: &Path) -> Result<bool, Error> {
    let (mut first, since) = (None, Instant::now());
    loop {
        let text = match sent(|| async { store.get(path).await?.bytes().await }).await {
            Err(Error::NotFound { .. }) => return Ok(false),
            text => text?,
        };
        let text = String::from_utf8_lossy(&text).into_owned();
        if text == CLOSED {
            return Ok(false);
        }
        if let Some(runs) = text.lines().next().and_then(runs_here) {
            return Ok(runs);
        }
        match &first {
            None => {
                info!("the last server did not close the volume, or runs: waiting for a sign of it")
            }
            Some(first) if *first != text => return Ok(true),
            Some(_) if since.elapsed() > SILENCE => return Ok(false),
            Some(_) => {}
        }
        first.get_or_insert(text);
        sleep(LOOK).await;
    }
}

/// Returns the machine since its start and the namespace of process ids, and the process.
fn here() -> Option<(String, String)> {
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
    let pids = fs::read_link("/proc/self/ns/pid").ok()?;
    let machine = format!("{} {}", boot.trim(), pids.display());
    Some((machine, process(&std::process::id().to_string())?))
}

/// Returns the id of a process and when it started; `None` if there is no such process.
fn process(id: &str) -> Option<String> {
    let stat = fs::read_to_string(format!("/proc/{id}/stat")).ok()?;
    // The name of the program, in parentheses, may have spaces and parentheses. 19 words follow up to the time of the
    // start.
    let started = stat.rsplit_once(") ")?.1.split(' ').nth(19)?;
    Some(format!("{id} {started}"))
}

fn holder() -> String {
    here().map_or_else(|| "unknown".into(), |(machine, process)| format!("{machine}; {process}"))
}

/// Returns whether the holder, a process of this machine, runs. `None` for another machine.
fn runs_here(holder: &str) -> Option<bool> {
    let (machine, _) = here()?;
    let (its_machine, its_process) = holder.split_once("; ")?;
    let id = its_process.split(' ').next().unwrap_or_default();
    (its_machine == machine).then(|| process(id).is_some_and(|now| now == its_process))
}

/// The path of the object that asks the server of a volume for a snapshot, whose name it has.
pub(super) fn requested(path: &Path) -> Path {
    path.clone().join("snapshot")
}

/// Returns the checkpoints with a name. The others are the database's own.
pub(super) async fn snapshots(admin: &Admin) -> Result<Vec<Checkpoint>, slatedb::Error> {
    let mut all = admin.list_checkpoints(None).await?;
    all.retain(|one| one.name.is_some() && one.expire_time.is_none());
    Ok(all)
}

/// Makes a snapshot of everything that the store has confirmed.
pub(super) async fn make(db: &Db, name: &str) -> Result<(), slatedb::Error> {
    let options = CheckpointOptions { name: Some(name.to_owned()), ..CheckpointOptions::default() };
    db.create_checkpoint(CheckpointScope::Durable, &options).await.map(drop)
}

/// The requests for snapshots of a volume that this server has open.
pub(super) struct SnapshotRequests {
    store: Arc<dyn ObjectStore>,
    path: Path,
    admin: Admin,
    db: Db,
}

impl SnapshotRequests {
    pub(super) fn new(store: &Arc<dyn ObjectStore>, path: &Path, db: &Db) -> Self {
        let admin = Admin::builder(path.clone(), Arc::clone(store)).build();
        Self { store: Arc::clone(store), path: requested(path), admin, db: db.clone() }
    }

    /// Makes the snapshot that is asked for, if any. After an error it is tried again with the next
    /// renewal.
    pub(super) async fn answer(&self) {
        let Ok(found) = self.store.get(&self.path).await else { return };
        let Ok(name) = found.bytes().await else { return };
        let name = String::from_utf8_lossy(&name).into_owned();
        let made = async {
            let is_there = |one: &Checkpoint| one.name.as_deref() == Some(&name);
            // A server before may have made it, and not deleted the request.
            if !snapshots(&self.admin).await?.iter().any(is_there) {
                make(&self.db, &name).await?;
            }
            Ok::<_, slatedb::Error>(())
        };
        match made.await {
            Ok(()) => {
                info!(name, "made a snapshot");
                let _ = self.store.delete(&self.path).await;
            }
            Err(error) => warn!(name, error = shown(&error), "made no snapshot"),
        }
    }
}

#[cfg(test)]
mod tests {
    use object_store::memory::InMemory;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_server_that_writes_is_seen_and_a_silent_or_closed_or_dead_one_is_not() {
        let store: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
        let path = Path::from("server");
        assert!(!is_held(&*store, &path).await.unwrap(), "there was none");
        let lease = Lease::begin(Arc::clone(&store), path.clone(), None).await;
        let since = Instant::now();
        assert!(is_held(&*store, &path).await.unwrap(), "this process runs");
        assert!(since.elapsed() < LOOK, "and is seen at once");
        lease.end().await;
        assert!(!is_held(&*store, &path).await.unwrap(), "it has closed the volume");
        // A server that another one has taken the volume from, and that has not noticed it.
        let lease = Lease::begin(Arc::clone(&store), path.clone(), None).await;
        store.put(&path, "elsewhere; 1 2\n7\n".into()).await.unwrap();
        lease.end().await;
        let text = store.get(&path).await.unwrap().bytes().await.unwrap();
        assert_eq!(text, "elsewhere; 1 2\n7\n", "the object is the other server's");
        // A server of another machine that was killed.
        store.put(&path, "elsewhere; 1 2\n7\n".into()).await.unwrap();
        let since = Instant::now();
        assert!(!is_held(&*store, &path).await.unwrap(), "it is silent");
        assert!(since.elapsed() > SILENCE);
        // A server of another machine that runs.
        let writer = Arc::clone(&store);
        let (at, number) = (path.clone(), 8);
        tokio::spawn(async move {
            sleep(RENEWAL).await;
            writer.put(&at, format!("elsewhere; 1 2\n{number}\n").into()).await.unwrap();
        });
        assert!(is_held(&*store, &path).await.unwrap(), "it writes");
        // A process of this machine that has ended: number 1 did not start at the time x.
        let (machine, _) = here().unwrap();
        store.put(&path, format!("{machine}; 1 x\n7\n").into()).await.unwrap();
        let since = Instant::now();
        assert!(!is_held(&*store, &path).await.unwrap() && since.elapsed() < LOOK, "it is gone");
    }
}
