//! `offlock-nbd snapshot`: snapshots of a volume, which are checkpoints of its database.

use clap::{Parser, Subcommand};
use slatedb::config::CheckpointOptions;
use uuid::Uuid;

use super::open::{Found, OpenOptions, Place, VolumeError, runtime};
use super::store::VolumeUrl;

/// Snapshots of a volume on an object store.
///
/// A snapshot has what the last FLUSH of the volume had confirmed. It takes no copy: only what changes later
/// needs space. Serve it with `--image 's3://BUCKET/VOLUME?snapshot=ID'`.
#[derive(Debug, Parser)]
#[command(name = "offlock-nbd snapshot", version)]
pub(crate) struct SnapshotArgs {
    #[command(subcommand)]
    command: SnapshotCommand,
}

#[derive(Debug, Subcommand)]
enum SnapshotCommand {
    /// Make a snapshot, also while the volume is served. Prints its ID.
    Create {
        #[arg(value_parser = volume)]
        volume: VolumeUrl,
        /// A name for the list of snapshots.
        #[arg(long)]
        name: Option<String>,
    },
    /// Print the ID, the time and the name of each snapshot.
    List {
        #[arg(value_parser = volume)]
        volume: VolumeUrl,
    },
    /// Delete a snapshot. What only it had is deleted later.
    Delete {
        #[arg(value_parser = volume)]
        volume: VolumeUrl,
        id: Uuid,
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
        let fail = |error| VolumeError::Store { volume: url.address.clone(), error };
        let runtime = runtime().map_err(fail)?;
        let (store, path) = url.open().map_err(fail)?;
        let place = Place { store, path, url, options: OpenOptions::default() };
        runtime.block_on(self.command.run(&place))
    }
}

impl SnapshotCommand {
    async fn run(&self, place: &Place<'_>) -> Result<String, VolumeError> {
        let Found::Volume(_) = place.look().await? else {
            return Err(VolumeError::Missing { volume: place.url.address.clone() });
        };
        let (admin, fail) = (place.admin(), |error| place.of_database(error));
        Ok(match self {
            Self::Create { name, .. } => {
                let options = CheckpointOptions { name: name.clone(), ..Default::default() };
                let made = admin.create_detached_checkpoint(&options).await.map_err(fail)?;
                format!("{}\n", made.id)
            }
            Self::List { .. } => {
                let all = admin.list_checkpoints(None).await.map_err(fail)?;
                let line = |one: &slatedb::Checkpoint| {
                    let name = one.name.as_deref().unwrap_or_default();
                    format!("{}  {}  {name}\n", one.id, one.create_time.format("%F %T UTC"))
                };
                // A checkpoint with an end is one of the database's own.
                all.iter().filter(|one| one.expire_time.is_none()).map(line).collect()
            }
            Self::Delete { id, .. } => {
                let all = admin.list_checkpoints(None).await.map_err(fail)?;
                if !all.iter().any(|one| one.id == *id) {
                    let (volume, id) = (place.url.address.clone(), id.to_string());
                    return Err(VolumeError::NoSnapshot { volume, id });
                }
                admin.delete_checkpoint(*id).await.map_err(fail)?;
                String::new()
            }
        })
    }
}
