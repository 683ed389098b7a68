//! The commands of one client.

use std::collections::HashMap;
use std::sync::Arc;

use radix_ctx::{CtxRef, Id};
use tokio::io::AsyncRead;

use crate::broker::Broker;
use crate::client::{Client, Closed};
use crate::lines::{Input, Lines, MAX_LINE};
use crate::protocol::{Command, Message, Outbound};
use crate::topics::Subscription;

/// A client with its subscriptions.
#[derive(Debug)]
pub(crate) struct Session<'s> {
    broker: &'s Broker,
    client: &'s Client,
    id: Id,
    subscriptions: HashMap<String, Subscription>,
}

impl<'s> Session<'s> {
    pub(crate) fn new(broker: &'s Broker, client: &'s CtxRef<Client>) -> Session<'s> {
        Session { broker, client, id: CtxRef::id(client), subscriptions: HashMap::new() }
    }

    /// Executes commands until the client leaves or its queue is closed.
    pub(crate) async fn run(&mut self, stream: impl AsyncRead + Unpin) {
        let mut lines = Lines::new(stream);
        // A read error ends the session like the end of the stream.
        while let Ok(input) = lines.next().await {
            let (answer, last) = match input {
                Input::Line("QUIT") | Input::End => return,
                Input::Line(line) => (self.execute(line), false),
                Input::NotText => (Err("the line is not UTF-8".to_string()), false),
                Input::TooLong => (Err(format!("the line is longer than {MAX_LINE} bytes")), true),
            };
            let line = answer.map_or_else(Outbound::Error, Outbound::Answer);
            if self.client.answer(line).await == Err(Closed) || last {
                return;
            }
        }
    }

    /// Executes a line that is not `QUIT`. Returns its answer, or why it failed.
    fn execute(&mut self, line: &str) -> Result<String, String> {
        match Command::parse(line).map_err(|error| error.to_string())? {
            Command::Subscribe { topic } => self.subscribe(topic),
            Command::Unsubscribe { topic } => self.unsubscribe(topic),
            Command::Publish { priority, topic, text } => self.publish(priority, topic, text),
            Command::Ping => Ok("PONG".to_string()),
        }
    }

    fn subscribe(&mut self, topic: &str) -> Result<String, String> {
        if self.subscriptions.contains_key(topic) {
            return Err(format!("already subscribed to {topic}"));
        }
        if self.subscriptions.len() == self.broker.limits.topics {
            return Err(format!("more than {} topics", self.broker.limits.topics));
        }
        let subscription =
            self.broker.topics.subscribe(topic, self.id).map_err(|error| error.to_string())?;
        self.subscriptions.insert(topic.to_string(), subscription);
        Ok(format!("OK SUB {topic}"))
    }

    fn unsubscribe(&mut self, topic: &str) -> Result<String, String> {
        let (topic, subscription) = self
            .subscriptions
            .remove_entry(topic)
            .ok_or_else(|| format!("not subscribed to {topic}"))?;
        self.broker.topics.unsubscribe(&topic, subscription);
        self.client.forget(&topic);
        Ok(format!("OK UNSUB {topic}"))
    }

    fn publish(&self, priority: u32, topic: &str, text: &str) -> Result<String, String> {
        let (topic, text) = (topic.to_string(), text.to_string());
        let message = Arc::new(Message { topic, priority, from: self.id, text });
        let sent = self.broker.publish(&message).map_err(|error| error.to_string())?;
        Ok(format!("OK PUB {} {}", sent.queued, sent.dropped))
    }
}

impl Drop for Session<'_> {
    fn drop(&mut self) {
        for (topic, subscription) in self.subscriptions.drain() {
            self.broker.topics.unsubscribe(&topic, subscription);
        }
    }
}
