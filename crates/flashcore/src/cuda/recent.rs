//! What was prepared last, so that equal problems are prepared once.

use std::sync::{Arc, Mutex, PoisonError};

/// Prepared things that are kept; the one that was asked for longest ago gives way.
const KEPT: usize = 64;

/// The last [`KEPT`] prepared things, the last one first.
#[derive(Debug)]
pub(super) struct Recent<R>(Mutex<Vec<Arc<R>>>);

impl<R> Default for Recent<R> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<R> Recent<R> {
    /// The one that `serves`, or else one that is `made` and kept.
    pub(super) fn find_or<E>(
        &self,
        serves: impl Fn(&R) -> bool,
        made: impl FnOnce() -> Result<R, E>,
    ) -> Result<Arc<R>, E> {
        let kept = || self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let found = |kept: &mut Vec<Arc<R>>| {
            let at = kept.iter().position(|ready| serves(ready))?;
            kept[..=at].rotate_right(1);
            Some(kept[0].clone())
        };
        if let Some(ready) = found(&mut kept()) {
            return Ok(ready);
        }
        let ready = Arc::new(made()?);
        let mut kept = kept();
        kept.insert(0, ready.clone());
        kept.truncate(KEPT);
        Ok(ready)
    }
}
