// SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause

//! Steps that are all taken, whatever fails.

/// Takes all steps of an iterator. Returns the first error.
pub(crate) fn first_error<E>(steps: impl IntoIterator<Item = Result<(), E>>) -> Result<(), E> {
    steps.into_iter().fold(Ok(()), Result::and)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn step_that_fails_leaves_the_others_to_be_taken() {
        let mut taken = Vec::new();
        let outcome = first_error([Ok(()), Err(1), Err(2), Ok(())].into_iter().inspect(|step| taken.push(*step)));
        assert_eq!((outcome, taken.len()), (Err(1), 4));
        assert_eq!(first_error::<()>([Ok(())]), Ok(()));
    }
}
