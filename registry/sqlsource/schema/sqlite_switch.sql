-- SQLite 3.25 or later. Switches of limiting for a whole fleet; a missing row means on.
CREATE TABLE IF NOT EXISTS `t_ratelimite_switch` (
  `name` VARCHAR(64) NOT NULL,
  `enabled` TINYINT DEFAULT 1 NOT NULL,
  PRIMARY KEY (`name`)
);
