//! `offlock-nbd snapshot`: snapshots of a volume, which are named checkpoints of its database.
//!
//! Only the server that has the volume open knows up to where the log is confirmed. So
//! `snapshot create` asks it by an object beside the volume, which the server looks for when it
//! renews its [`lease`](super::lease), and deletes once the snapshot is there. Without a server the
//! command opens the volume itself.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use clap::{Parser, Subcommand};
use object_store::{Error, ObjectStoreExt};
use slatedb::Checkpoint;
use tokio::time::sleep;

use super::lease::{self, RENEWAL, make, requested, snapshots};
use super::open::{Found, OpenOptions, Place, Problem, VolumeError, runtime};
use super::store::{self, Checked, sent};
use super::url::{VolumeUrl, snapshot_name};

/// How long `snapshot create` waits for the server.
const WAIT: Duration = Duration::from_secs(3 * RENEWAL.as_secs());
/// How often it looks.
const LOOK: Duration = Duration::from_secs(1);

/// Snapshots of a volume on an object store.
///
/// A snapshot has at least what the last FLUSH of the volume has confirmed. It takes no copy: only what
/// changes later needs space. Serve it with `--image 's3://BUCKET/VOLUME?snapshot=NAME'`.
#[derive(Debug, Parser)]
#[command(name = "offlock-nbd snapshot", version)]
pub(crate) struct SnapshotArgs {
    #[command(subcommand)]
    command: SnapshotCommand,
}

#[derive(Debug, Subcommand)]
enum SnapshotCommand {
    /// Make a snapshot. A server that has the volume open makes it within 40 seconds.
    Create {
        #[arg(value_parser = volume)]
        volume: VolumeUrl,
        #[arg(value_parser = snapshot_name)]
        name: String,
    },
    /// Print the time and the name of each snapshot.
    List {
        #[arg(value_parser = volume)]
        volume: VolumeUrl,
    },
    /// Delete a snapshot. A server of the volume deletes what only the snapshot had.
    Delete {
        #[arg(value_parser = volume)]
        volume: VolumeUrl,
        #[arg(value_parser = snapshot_name)]
        name: String,
    },
}

fn volume(text: &str) -> Result<VolumeUrl, String> {
    VolumeUrl::parse(text).unwrap_or_else(|| Err(format!("'{text}' is no address of a volume")))
}

impl SnapshotArgs {
    /// Carries out the command. Returns the text for standard output. Blocks.
    pub(crate) fn run(self) -> Result<String, VolumeError> {
        let (SnapshotCommand::Create { volume: url, .. }
        | SnapshotCommand::List { volume: url }
        | SnapshotCommand::Delete { volume: url, .. }) = &self.command;
        let run = || {
            let (runtime, (store, path)) = (runtime()?, store::open(url)?);
            let store = Arc::new(Checked::new(store));
            let place = Place { store, path, url, options: OpenOptions::default() };
            runtime.block_on(self.command.run(&place))
        };
        run().map_err(|problem| VolumeError::new(url, problem))
    }
}

impl SnapshotCommand {
    async fn run(&self, place: &Place<'_>) -> Result<String, Problem> {
        let found = place.look().await?;
        let Found::Volume(len) = found else {
            return Err(Problem::Missing);
        };
        match self {
            Self::Create { name, .. } => {
                place.create_snapshot(len, name).await.map(|()| String::new())
            }
            Self::List { .. } => {
                let line = |one: &Checkpoint| {
                    let name = one.name.as_deref().unwrap_or_default();
                    format!("{}  {name}\n", one.create_time.format("%F %T UTC"))
                };
                Ok(place.snapshots().await?.iter().map(line).collect())
            }
            Self::Delete { name, .. } => {
                let id = place.snapshot(name).await?.id;
                place.admin().delete_checkpoint(id).await?;
                Ok(String::new())
            }
        }
    }
}

impl Place<'_> {
    pub(super) async fn snapshots(&self) -> Result<Vec<Checkpoint>, Problem> {
        Ok(snapshots(&self.admin()).await?)
    }

    /// Returns the snapshot with this name.
    pub(super) async fn snapshot(&self, name: &str) -> Result<Checkpoint, Problem> {
        let named = |one: &Checkpoint| one.name.as_deref() == Some(name);
        let missing = || Problem::NoSnapshot(name.to_owned());
        self.snapshots().await?.into_iter().find(named).ok_or_else(missing)
    }

    pub(super) async fn create_snapshot(&self, len: u64, name: &str) -> Result<(), Problem> {
        if self.snapshot(name).await.is_ok() {
            return Err(Problem::SnapshotExists(name.to_owned()));
        }
        if !lease::is_held(&*self.store, &self.lease()).await? {
            let db = self.writer(len, &Found::Volume(len), &Arc::default()).await?;
            let (made, closed) = (make(&db, name).await, db.close().await);
            return Ok(made.and(closed)?);
        }
        let at = requested(&self.path);
        let ask = || self.store.put(&at, name.to_owned().into());
        sent(ask).await?;
        let answered = async {
            loop {
                sleep(LOOK).await;
                match sent(|| self.store.head(&at)).await {
                    Err(Error::NotFound { .. }) => return self.snapshot(name).await.map(drop),
                    result => result?,
                };
            }
        };
        match tokio::time::timeout(WAIT, answered).await {
            Ok(answered) => answered,
            Err(_) => {
                // If this fails, the next server of the volume makes the snapshot.
                let _ = self.store.delete(&at).await;
                let error =
                    io::Error::new(io::ErrorKind::TimedOut, "the server has made no snapshot");
                Err(error.into())
            }
        }
    }
}
