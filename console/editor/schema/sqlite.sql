-- SQLite 3.25 or later. Who changed what, when and why: a row is written with the change, or neither.
-- ofTable and name say which row; fromRow and toRow are all of its columns before and after, as JSON of texts; NULL: there
-- was none, there is none. undoneBy is the auditId of the change that undid this one. Of a penalty or a reset fromRow is NULL,
-- and toRow is a JSON text that says what was done.
CREATE TABLE IF NOT EXISTS `t_ratelimite_audit` (
  `auditId` INTEGER NOT NULL,
  `changedAt` DATETIME NOT NULL DEFAULT (strftime('%Y-%m-%d %H:%M:%f', 'now')),
  `changedBy` VARCHAR(256) NOT NULL,
  `why` VARCHAR(2000) NOT NULL,
  `ofTable` VARCHAR(129) NOT NULL,
  `name` VARCHAR(512) NOT NULL,
  `fromRow` TEXT NULL,
  `toRow` TEXT NULL,
  `undoneBy` INTEGER NULL,
  PRIMARY KEY (`auditId` AUTOINCREMENT)
);
