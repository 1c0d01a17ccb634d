// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Answers that clients share. If several clients wait for the answer to the same question, the VM's state is read only once for all these
//! clients. The body of the answer is also rendered only once.
//!
//! A client always gets a state that was read after its request arrived. So a client that asks during a reading waits for the next reading.

use std::collections::BTreeMap;
use std::future::Future;
use std::mem;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::oneshot;

/// Clients that wait for the next answer. The key is the name of the clients' question. A question has an entry while a task reads the VM's
/// state to answer the question.
type Waiting<T> = Mutex<BTreeMap<&'static str, Vec<oneshot::Sender<T>>>>;

/// Questions that clients have asked, each with the clients that wait for the answer.
#[derive(Debug)]
pub(super) struct Readings<T>(Arc<Waiting<T>>);

impl<T> Default for Readings<T> {
    fn default() -> Self {
        Self(Arc::default())
    }
}

impl<T: Clone + Send + 'static> Readings<T> {
    /// Returns the answer to question `name`. `ask` produces the answer. Returns `None` if the tokio runtime ends before the answer exists.
    /// Must be called within a tokio runtime.
    pub(super) async fn read<F>(&self, name: &'static str, ask: impl Fn() -> F + Send + 'static) -> Option<T>
    where
        F: Future<Output = T> + Send + 'static,
    {
        let (sender, answer) = oneshot::channel();
        let asked = {
            let mut waiting = lock(&self.0);
            let asked = waiting.contains_key(name);
            waiting.entry(name).or_default().push(sender);
            asked
        };
        if !asked {
            // The reading runs in a separate task, because the first client may disconnect before the other clients have their answer.
            tokio::spawn(serve(self.0.clone(), name, ask));
        }
        answer.await.ok()
    }
}

/// Answers the clients that asked question `name`, until no client waits for an answer to the question.
async fn serve<T: Clone, F: Future<Output = T>>(waiting: Arc<Waiting<T>>, name: &'static str, ask: impl Fn() -> F) {
    while let Some(clients) = next(&waiting, name) {
        let answer = ask().await;
        for client in clients {
            // The send fails if the client has disconnected.
            let _ = client.send(answer.clone());
        }
    }
}

/// Returns the clients that wait now. Removes the entry and returns `None` if no client waits.
fn next<T>(waiting: &Waiting<T>, name: &'static str) -> Option<Vec<oneshot::Sender<T>>> {
    let mut waiting = lock(waiting);
    let clients = waiting.get_mut(name).map(mem::take).unwrap_or_default();
    if clients.is_empty() {
        waiting.remove(name);
        return None;
    }
    Some(clients)
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use tokio::sync::Semaphore;
    use tokio::task::JoinSet;

    use super::*;

    fn run(test: impl Future<Output = ()>) {
        tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(test);
    }

    /// Source of answers. Each reading waits until the test adds a permit. The answer is the number of readings so far.
    #[derive(Clone)]
    struct Source {
        asked: Arc<AtomicUsize>,
        let_go: Arc<Semaphore>,
    }

    impl Source {
        fn new() -> Self {
            Self { asked: Arc::default(), let_go: Arc::new(Semaphore::new(0)) }
        }

        fn read(
            &self,
            readings: &Arc<Readings<usize>>,
            name: &'static str,
        ) -> impl Future<Output = Option<usize>> + use<> {
            let (source, readings) = (self.clone(), readings.clone());
            async move {
                let ask = move || {
                    let source = source.clone();
                    async move {
                        let number = source.asked.fetch_add(1, Ordering::Relaxed) + 1;
                        source.let_go.acquire().await.unwrap().forget();
                        number
                    }
                };
                readings.read(name, ask).await
            }
        }
    }

    async fn others_run() {
        for _ in 0..50 {
            tokio::task::yield_now().await;
        }
    }

    #[test]
    fn clients_that_come_during_an_answer_share_the_next_one() {
        run(async {
            let (source, readings) = (Source::new(), Arc::default());
            let first = tokio::spawn(source.read(&readings, "a"));
            others_run().await;
            let mut others: JoinSet<_> = (0..10).map(|_| source.read(&readings, "a")).collect();
            others_run().await;
            assert_eq!(source.asked.load(Ordering::Relaxed), 1);
            source.let_go.add_permits(1);
            assert_eq!(first.await.unwrap(), Some(1));
            source.let_go.add_permits(1);
            while let Some(answer) = others.join_next().await {
                assert_eq!(answer.unwrap(), Some(2));
            }
            others_run().await;
            assert!(lock(&readings.0).is_empty());
            source.let_go.add_permits(1);
            assert_eq!(source.read(&readings, "a").await, Some(3));
        });
    }

    #[test]
    fn different_questions_do_not_wait_for_each_other() {
        run(async {
            let (stuck, quick, readings) = (Source::new(), Source::new(), Arc::default());
            let never = tokio::spawn(stuck.read(&readings, "stuck"));
            quick.let_go.add_permits(1);
            assert_eq!(quick.read(&readings, "quick").await, Some(1));
            assert!(!never.is_finished());
        });
    }

    #[test]
    fn client_that_leaves_does_not_keep_others_from_an_answer() {
        run(async {
            let (source, readings) = (Source::new(), Arc::default());
            let first = tokio::spawn(source.read(&readings, "a"));
            others_run().await;
            let second = tokio::spawn(source.read(&readings, "a"));
            others_run().await;
            first.abort();
            source.let_go.add_permits(2);
            assert_eq!(second.await.unwrap(), Some(2));
        });
    }
}
