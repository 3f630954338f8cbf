"""From a request to tokens: the loop over all rows, its one step, and how steps are run (``step=``)."""
