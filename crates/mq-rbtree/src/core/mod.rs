mod fifo;
mod levels;
